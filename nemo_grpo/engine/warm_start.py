"""A policy to begin with, made on the spot: tokenizer, tiny Qwen2, short supervised training.

The result is an ordinary Hugging Face folder in a cache, keyed by everything that it depends on. Nothing is
downloaded, and every variant of a comparison starts from the same weights.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerFast, Qwen2Config

from nemo_grpo.engine.warm_start_tokenizer import SEED_OFFSET, build_tokenizer
from nemo_grpo.errors import UserError
from nemo_grpo.files import flush_tree, make_readable
from nemo_grpo.hf_folder import export, load_config, load_tokenizer, load_weights, no_transformers_bars
from nemo_grpo.progress import progress
from nemo_grpo.recipe.layout import Layout
from nemo_grpo.recipe.megatron_sections import MegatronOptimizer, MegatronScheduler
from nemo_grpo.recipe.own import WarmStart
from nemo_grpo.sampling.generate_distributed import from_first_rank
from nemo_grpo.tasks import Prompt, Task
from nemo_grpo.training.demonstrations import demonstrated
from nemo_grpo.training.rollout import Group, assemble
from nemo_grpo.variants import parse_loss_fn

if TYPE_CHECKING:
    from transformers import Qwen2ForCausalLM

    from nemo_grpo.engine.megatron.policy import MegatronPolicy

log = logging.getLogger(__name__)

FORMAT_VERSION = 2
"""Raise it when this file or `warm_start_tokenizer` makes something else from the same settings: part of the
cache's key."""

NUM_KEY_PROBLEMS = 32
"""Problems whose demonstrations are part of the cache's key: a task that writes others gets a new policy."""
WARM_UP_STEPS = 30
"""Of the learning rate; in a short training, a quarter of its steps."""
FINAL_LR_SHARE = 0.1
BATCHES_PER_POOL = 4
MODEL = "model"
"""Folder within the unfinished one."""


def warm_start(
    config: WarmStart,
    task: Task,
    prompt: Prompt,
    *,
    layout: Layout | None = None,
    device: torch.device | None = None,
) -> Path:
    """The folder with the warm-started policy; made if the cache has none with these settings.

    `SFT` on training demonstrations: AdamW, linear warm-up, cosine decay to a tenth. The same settings, seed,
    thread count, layout and torch version give the same weights. Every rank of a launch calls it.

    Args:    prompt: as in training and evaluation.  layout: model-parallel sizes; default: none.
             device: default: the CPU.
    Returns: folder: config.json, model.safetensors (float32), tokenizer, chat template and generation config.
    Raises:  UserError: the task has no demonstrations, they do not fit into the context, or the cache cannot
             be written.
    """
    target = Path(config.cache_dir).expanduser() / cache_key(config, task, prompt)
    unfinished = from_first_rank(partial(_begin, config, task, target))
    if unfinished is None:
        log.info("warm start: using %s", target)
        return target
    try:
        if config.num_steps:
            fine_tune(unfinished / MODEL, config, task, prompt, layout or Layout(), device)
        from_first_rank(partial(_publish, unfinished / MODEL, target))
    finally:
        if not dist.is_initialized() or dist.get_rank() == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
    return target


def _begin(config: WarmStart, task: Task, target: Path) -> Path | None:
    """A temporary folder with tokenizer and random weights; None if the target is there."""
    if target.is_dir():
        return None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        where = f"nemo_grpo.warm_start.cache_dir={config.cache_dir}"
        raise UserError(f"{where} cannot be written: {error.strerror}; choose another folder") from error
    try:
        tokenizer = build_tokenizer(task, config.vocab_size, config.seed)
        with no_transformers_bars():
            build_model(config, tokenizer).save_pretrained(unfinished / MODEL)
        tokenizer.save_pretrained(unfinished / MODEL)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return unfinished


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
    folder: Path, config: WarmStart, task: Task, prompt: Prompt, layout: Layout, device: torch.device | None
) -> None:
    """Train the folder's model on ``num_steps`` batches of demonstrations; replaces its weights."""
    from nemo_grpo.engine.megatron import parallel  # most runs find the model made

    joined = dist.is_initialized()
    try:
        with torch.random.fork_rng(devices=[]):
            policy = _trained(folder, config, task, prompt, layout, device)
        tensors = list(policy.named_tensors())  # every rank takes part in gathering them
        if parallel.is_rank_zero():
            export(tensors, folder, folder, torch.float32, training=None)
    finally:
        if not joined:
            parallel.shut_down()


def _trained(
    folder: Path, config: WarmStart, task: Task, prompt: Prompt, layout: Layout, device: torch.device | None
) -> MegatronPolicy:
    from nemo_grpo.engine.megatron.policy import MegatronPolicy

    tokenizer, objective = load_tokenizer(folder), parse_loss_fn({"variant": "sft"}).build()
    policy = MegatronPolicy(
        load_config(folder), *schedule(config), layout=layout, device=device, seed=config.seed
    )
    policy.load_weights(load_weights(folder), keep_reference=False)
    leads = not dist.is_initialized() or dist.get_rank() == 0
    shown = progress("warm start", config.num_steps) if leads else nullcontext(lambda _note: None)
    with shown as advance:
        for groups in islice(_batches(tokenizer, config, task, prompt), config.num_steps):
            step = assemble(groups)
            result = policy.update(
                objective,
                objective.prepare(step.token_batch(step.generation_logprobs)),
                step.sequences,
                micro_batch_size=config.batch_size,
                temperature=1.0,
            )
            advance(f"loss {result.metrics['loss/total']:.3f}")
    return policy


def schedule(config: WarmStart) -> tuple[MegatronOptimizer, MegatronScheduler]:
    """AdamW; linear warm-up from a fraction of the peak, cosine to a tenth of it."""
    warm_up = min(WARM_UP_STEPS, config.num_steps // 4)
    optimizer = MegatronOptimizer(
        lr=config.lr, min_lr=FINAL_LR_SHARE * config.lr, adam_beta2=0.98, use_distributed_optimizer=False
    )
    return optimizer, MegatronScheduler(
        lr_decay_style="cosine",
        lr_decay_iters=config.num_steps,
        lr_warmup_iters=warm_up,
        lr_warmup_init=config.lr / (warm_up + 1),
    )


def _batches(tokenizer: Any, config: WarmStart, task: Task, prompt: Prompt) -> Iterator[list[Group]]:
    """Demonstrations, ``batch_size`` at a time; like lengths together: little padding."""
    rng = random.Random(config.seed)
    pool_size = config.batch_size * BATCHES_PER_POOL
    key, limit = "nemo_grpo.warm_start.max_position_embeddings", config.max_position_embeddings
    for pool in range(-(-config.num_steps // BATCHES_PER_POOL)):
        numbers = range(pool * pool_size, (pool + 1) * pool_size)
        problems = [task.train_problem(number, SEED_OFFSET + config.seed) for number in numbers]
        groups = [
            demonstrated(tokenizer, task, prompt, problem, rng, limit=limit, key=key) for problem in problems
        ]
        groups.sort(key=lambda group: len(group.prompt) + len(group.responses[0].tokens))
        starts = list(range(0, pool_size, config.batch_size))
        rng.shuffle(starts)
        for start in starts:
            yield groups[start : start + config.batch_size]


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
