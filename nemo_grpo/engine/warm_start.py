"""A policy to begin with, made on the spot: tokenizer, tiny Qwen2, short supervised training.

The result is an ordinary Hugging Face folder in a cache, keyed by everything that it depends on. Nothing is
downloaded, and every variant of a comparison starts from the same weights.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerFast, Qwen2Config

from nemo_grpo.engine.warm_start_tokenizer import SEED_OFFSET, build_tokenizer
from nemo_grpo.errors import UserError
from nemo_grpo.files import flush_tree, make_readable
from nemo_grpo.hf_folder import no_transformers_bars
from nemo_grpo.progress import progress
from nemo_grpo.recipe.own import WarmStart
from nemo_grpo.tasks import Problem, Prompt, Task, encode_prompt
from nemo_grpo.tasks.environment import MultiTurnTask

if TYPE_CHECKING:
    from transformers import Qwen2ForCausalLM

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
"""Raise it when this file or `warm_start_tokenizer` makes something else from the same settings: part of the
cache's key."""

NUM_KEY_PROBLEMS = 32
"""Problems whose demonstrations are part of the cache's key: a task that writes others gets a new policy."""
WARM_UP_STEPS = 30
FINAL_LR_SHARE = 0.1
MAX_GRAD_NORM = 1.0
BATCHES_PER_POOL = 4
NO_LOSS = -100
"""A label that cross-entropy leaves out."""


def warm_start(config: WarmStart, task: Task, prompt: Prompt) -> Path:
    """The folder with the warm-started policy; made if the cache has none with these settings.

    Cross-entropy on the responses of TRAINING demonstrations (prompts carry no loss), AdamW, linear warm-up,
    cosine decay to a tenth. The same settings, seed, thread count and torch version give the same weights.

    Args:    prompt: as in training and evaluation.
    Returns: folder: config.json, model.safetensors (float32), tokenizer, chat template and generation config.
    Raises:  UserError: the task has no demonstrations, they do not fit into the context, or the cache cannot
             be written.
    """
    target = Path(config.cache_dir).expanduser() / cache_key(config, task, prompt)
    if target.is_dir():
        log.info("warm start: using %s", target)
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        where = f"nemo_grpo.warm_start.cache_dir={config.cache_dir}"
        raise UserError(f"{where} cannot be written: {error.strerror}; choose another folder") from error
    try:
        tokenizer = build_tokenizer(task, config.vocab_size, config.seed)
        model = build_model(config, tokenizer)
        fine_tune(model, tokenizer, config, task, prompt)
        with no_transformers_bars():
            model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        _publish(unfinished, target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def cache_key(config: WarmStart, task: Task, prompt: Prompt) -> str:
    """Name of the cached folder: the task's name and a hash of all that the weights depend on.

    Of the task's code and files it sees the first training problems with their demonstrations.
    """
    rng = random.Random(config.seed)
    problems = [task.train_problem(index, SEED_OFFSET + config.seed) for index in range(NUM_KEY_PROBLEMS)]
    content = {
        "format": FORMAT_VERSION,
        "settings": config.model_dump(exclude={"seed", "cache_dir"}),
        "task": task.config.model_dump(mode="json"),
        "shown": [[problem.question, task.demonstration(problem, rng)] for problem in problems],
        "prompt": {
            "system": prompt.system,
            "template": prompt.template,
            "use_chat_template": prompt.use_chat_template,
            "response_prefix": prompt.response_prefix,
        },
        "seed": config.seed,
    }
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return f"{task.config.name}-{digest[:16]}"


def build_model(config: WarmStart, tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """A Qwen2 with tied embeddings and random weights; the vocabulary is the tokenizer's, rounded up to 8."""
    architecture = Qwen2Config(
        vocab_size=-(-len(tokenizer) // 8) * 8,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=True,
        use_sliding_window=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    from transformers import Qwen2ForCausalLM  # takes a second, and most runs find the model made

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return Qwen2ForCausalLM(architecture)


def fine_tune(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    config: WarmStart,
    task: Task,
    prompt: Prompt,
) -> None:
    """Train the model in place on ``num_steps`` batches of demonstrations."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.98), weight_decay=0.01)
    batches = _batches(tokenizer, config, task, prompt)
    model.train()
    with progress("warm start", config.num_steps) as advance:
        for step in range(config.num_steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, config.num_steps, config.lr)
            input_ids, labels = next(batches)
            logits = model(input_ids=input_ids).logits
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            advance(f"loss {loss.item():.3f}")
    model.eval()


def learning_rate(step: int, num_steps: int, peak: float) -> float:
    """Linear over the first 30 steps, times a cosine from 1 down to 0.1."""
    cosine = (1 + math.cos(math.pi * step / num_steps)) / 2
    return peak * min(1.0, (step + 1) / WARM_UP_STEPS) * (FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * cosine)


def _batches(
    tokenizer: Any, config: WarmStart, task: Task, prompt: Prompt
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(input_ids, labels), [batch_size, T] int64, -100: no loss; like lengths together: little padding."""
    rng = random.Random(config.seed)
    pool_size = config.batch_size * BATCHES_PER_POOL
    for pool in range(-(-config.num_steps // BATCHES_PER_POOL)):
        problems = [
            task.train_problem(pool * pool_size + i, SEED_OFFSET + config.seed) for i in range(pool_size)
        ]
        examples = [render_example(tokenizer, task, prompt, problem, rng) for problem in problems]
        examples.sort(key=lambda example: len(example[0]))
        starts = list(range(0, pool_size, config.batch_size))
        rng.shuffle(starts)
        for start in starts:
            yield _collate(examples[start : start + config.batch_size], tokenizer.pad_token_id, config)


def render_example(
    tokenizer: Any, task: Task, prompt: Prompt, problem: Problem, rng: random.Random
) -> tuple[list[int], list[int]]:
    """(token ids, labels) of a demonstration; only what the policy is to write has labels."""
    ids = encode_prompt(tokenizer, prompt, problem)
    labels = [NO_LOSS] * len(ids)
    response = task.demonstration(problem, rng).removeprefix(prompt.response_prefix)
    parts = task.segments(response) if isinstance(task, MultiTurnTask) else [(response, True)]
    for text, written in parts:
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += tokens
        labels += tokens if written else [NO_LOSS] * len(tokens)
    return [*ids, tokenizer.eos_token_id], [*labels, tokenizer.eos_token_id]


def _collate(
    examples: list[tuple[list[int], list[int]]], pad_token_id: int, config: WarmStart
) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(ids) for ids, _ in examples)
    if width > config.max_position_embeddings:
        raise UserError(
            f"a demonstration with its prompt has {width} tokens; "
            f"raise nemo_grpo.warm_start.max_position_embeddings={config.max_position_embeddings}"
        )
    input_ids = torch.full((len(examples), width), pad_token_id)
    all_labels = torch.full((len(examples), width), NO_LOSS)
    for row, (ids, labels) in enumerate(examples):
        input_ids[row, : len(ids)] = torch.tensor(ids)
        all_labels[row, : len(ids)] = torch.tensor(labels)
    return input_ids, all_labels


def _publish(unfinished: Path, target: Path) -> None:
    """Give the finished folder its name in one step, after its bytes are on the disk."""
    make_readable(unfinished)
    flush_tree(unfinished)
    try:
        unfinished.rename(target)
    except OSError:
        # Another process made the same folder meanwhile; both are complete, the first stays.
        if not target.is_dir():
            raise
