"""The model that a run starts from: the folder that the recipe names, or a new model with random weights."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedTokenizerFast, Qwen2Config

from nemo_grpo.engine.task_tokenizer import build_tokenizer
from nemo_grpo.recipe import Recipe
from nemo_grpo.recipe.own import NewModel
from nemo_grpo.support.hf_folder import no_transformers_bars
from nemo_grpo.tasks import Task
from nemo_grpo.tasks.base import make_ready

if TYPE_CHECKING:
    from transformers import Qwen2ForCausalLM

VOCABULARY_MULTIPLE = 8
"""Divisor of the number of rows of the output layer, with which matrix products are faster."""


@contextmanager
def starting_model(recipe: Recipe, task: Task) -> Iterator[Path]:
    """Give the Hugging Face folder that a run starts from, within the block.

    A new model is written to a temporary folder, by each rank to its own. The same seed gives the same
    weights and tokenizer, so all ranks agree, and a resumed run has the tokenizer that it began with.

    Raises:
        UserError: The vocabulary is too small for the task's tags, or the task has no demonstrations.
    """
    if recipe.policy.model_name is not None:
        yield Path(recipe.policy.model_name)
        return
    sizes = recipe.nemo_grpo.new_model
    # The rules refuse a recipe with neither a model's name nor a new model.
    assert sizes is not None
    with tempfile.TemporaryDirectory(prefix="nemo_grpo-new-model-") as folder:
        yield write_new_model(sizes, task, Path(folder))


def write_new_model(sizes: NewModel, task: Task, folder: Path) -> Path:
    """Write tokenizer, configuration and random weights into a folder, and return the folder."""
    make_ready(task)
    tokenizer = build_tokenizer(task, sizes.vocab_size, sizes.seed)
    tokenizer.save_pretrained(folder)
    with no_transformers_bars():
        build_model(sizes, tokenizer).save_pretrained(folder)
    return folder


def build_model(sizes: NewModel, tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """Make a Qwen2 with tied embeddings and random weights; the vocabulary becomes a multiple of 8."""
    vocab_size = len(tokenizer) + -len(tokenizer) % VOCABULARY_MULTIPLE
    architecture = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_hidden_layers=sizes.num_hidden_layers,
        num_attention_heads=sizes.num_attention_heads,
        num_key_value_heads=sizes.num_key_value_heads,
        max_position_embeddings=sizes.max_position_embeddings,
        tie_word_embeddings=True,
        use_sliding_window=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    # Imported late: the import takes a second, and only this function needs it.
    from transformers import Qwen2ForCausalLM

    # The state of the global generator is restored, so that the random weights do not change the numbers that
    # the run draws from grpo.seed.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sizes.seed)
        return Qwen2ForCausalLM(architecture)
