"""Starting model of a run: the folder that the recipe names, or a new model with random weights."""

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
"""The output layer's rows are a multiple of this, which matrix products prefer."""


@contextmanager
def starting_model(recipe: Recipe, task: Task) -> Iterator[Path]:
    """Give the Hugging Face folder that a run starts from, for as long as the run needs it.

    A new model lies in a temporary folder, on every rank in one of its own. The same seed gives the same
    weights and tokenizer, so the ranks agree, and a resumed run finds the tokenizer that it began with.

    Raises:
        UserError: the vocabulary is too small for the task's tags, or the task has no demonstrations.
    """
    if recipe.policy.model_name is not None:
        yield Path(recipe.policy.model_name)
        return
    sizes = recipe.nemo_grpo.new_model
    # The rules refuse a recipe with neither.
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
    from transformers import Qwen2ForCausalLM  # importing it takes a second, which only this function needs

    # The caller's random numbers stay as they were: the run draws its own from grpo.seed.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sizes.seed)
        return Qwen2ForCausalLM(architecture)
