"""Starting policy of a run: the recipe's model, or a tiny one trained on the task's demonstrations.

A warm-started policy is an ordinary Hugging Face folder in a cache, keyed by everything that it depends on.
Nothing is downloaded, and every variant of a comparison starts from the same weights.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerFast, Qwen2Config

from nemo_grpo.engine.loop import train
from nemo_grpo.engine.megatron import parallel
from nemo_grpo.engine.saving import TrainingAborted
from nemo_grpo.engine.setup import set_up
from nemo_grpo.engine.warm_start_tokenizer import SEED_OFFSET, build_tokenizer
from nemo_grpo.recipe import Recipe, load_recipe_dict
from nemo_grpo.recipe.own import WarmStart
from nemo_grpo.support import distributed
from nemo_grpo.support.distributed import from_first_rank
from nemo_grpo.support.errors import UserError
from nemo_grpo.support.files import flush_tree, make_readable
from nemo_grpo.support.hf_folder import export, no_transformers_bars
from nemo_grpo.tasks import Prompt, Task
from nemo_grpo.tasks.base import make_ready

if TYPE_CHECKING:
    from transformers import Qwen2ForCausalLM

log = logging.getLogger(__name__)

FORMAT_VERSION = 3
"""Part of the cache's key; raise it when the same settings make something else."""
NUM_KEY_PROBLEMS = 32
"""Problems whose demonstrations are part of the cache's key: a task that writes others gets a new policy."""
WARM_UP_STEPS = 30
"""Updates of the learning rate's warm-up; in a short training, a quarter of its steps."""
FINAL_LR_SHARE = 0.1
"""Learning rate after the last update, as a share of its peak."""
SEQUENCES_PER_MICROBATCH = 8
"""Longest sequences that fit into a packed microbatch."""
MODEL, RUN = "model", "warm-start"
"""Folders of the model and of its supervised run within the unfinished one."""


def starting_policy(recipe: Recipe) -> Path:
    """Return the folder of policy.model_name, or of the warm-started model, made if the cache has none.

    The same settings, seed, thread count, layout and torch version give the same weights. Every rank of a
    launch calls it.

    Raises: UserError: the task has no demonstrations, they do not fit into the context, or the cache cannot
            be written.  TrainingAborted: a signal stopped it, or the training failed.
    """
    if recipe.policy.model_name is not None:
        return Path(recipe.policy.model_name)
    config, task, prompt = recipe.nemo_grpo.warm_start, recipe.task.build(), recipe.nemo_grpo.prompt
    assert config is not None
    from_first_rank(partial(make_ready, task))
    target = Path(config.cache_dir).expanduser() / cache_key(config, task, prompt)
    unfinished = from_first_rank(partial(_begin, config, task, target))
    if unfinished is None:
        log.info("warm start: using %s", target)
        return target
    try:
        if config.num_steps:
            _fine_tune(supervised_recipe(recipe, unfinished), unfinished / MODEL)
        from_first_rank(partial(_publish, unfinished / MODEL, target))
    finally:
        if distributed.is_rank_zero():
            shutil.rmtree(unfinished, ignore_errors=True)
    return target


def _fine_tune(recipe: Recipe, model: Path) -> None:
    joined = dist.is_initialized()
    try:
        with torch.random.fork_rng(devices=[]):
            parts = set_up(recipe, model)
            if not train(parts):
                raise TrainingAborted("the warm start was stopped; the next start makes it anew")
        tensors = list(parts.policy.named_tensors())  # every rank takes part in gathering them
        if distributed.is_rank_zero():
            export(tensors, model, model, torch.float32, training=None)
    except UserError as error:
        raise UserError(f"nemo_grpo.warm_start: {error}") from None
    finally:
        if not joined:
            parallel.shut_down()


def _begin(config: WarmStart, task: Task, target: Path) -> Path | None:
    """Make a temporary folder with tokenizer and random weights; None: the target exists."""
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
    """Name the cached folder: the task's name and a hash of all that the weights depend on.

    The task's code and files count by its first training problems and demonstrations.
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
    """Make a Qwen2 with tied embeddings and random weights; its vocabulary is rounded up to 8."""
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


def supervised_recipe(recipe: Recipe, folder: Path) -> Recipe:
    """Return the supervised run that trains the model in ``folder`` on the task's demonstrations.

    AdamW, linear warm-up from a fraction of the peak, cosine decay to a tenth of it, in float32.
    """
    own, config, megatron = recipe.nemo_grpo, recipe.nemo_grpo.warm_start, recipe.policy.megatron_cfg
    assert config is not None
    warm_up, layout = min(WARM_UP_STEPS, config.num_steps // 4), megatron.layout
    length, batch_size = config.max_position_embeddings, config.batch_size
    mb_tokens = SEQUENCES_PER_MICROBATCH * length
    tree = {
        "grpo": {
            "num_prompts_per_step": batch_size,
            "num_generations_per_prompt": 1,
            "max_num_steps": config.num_steps,
            "seed": SEED_OFFSET + config.seed,
            "val_period": 0,
        },
        "loss_fn": {"variant": "sft"},
        "policy": {
            "model_name": str(folder / MODEL),
            "train_global_batch_size": batch_size,
            "train_micro_batch_size": batch_size,
            "max_total_sequence_length": length,
            "sequence_packing": {
                "enabled": True,
                "train_mb_tokens": mb_tokens,
                "logprob_mb_tokens": mb_tokens,
            },
            "precision": "float32",
            "generation": {"max_new_tokens": 1},
            "megatron_cfg": {
                "tensor_model_parallel_size": layout.tensor,
                "pipeline_model_parallel_size": layout.pipeline,
                "context_parallel_size": layout.context,
                "optimizer": {
                    "lr": config.lr,
                    "min_lr": FINAL_LR_SHARE * config.lr,
                    "adam_beta2": 0.98,
                    "use_distributed_optimizer": False,
                },
                "scheduler": {
                    "lr_decay_style": "cosine",
                    "lr_decay_iters": config.num_steps,
                    "lr_warmup_iters": warm_up,
                    "lr_warmup_init": config.lr / (warm_up + 1),
                },
            },
        },
        "checkpointing": {"enabled": False},
        "logger": {"tensorboard_enabled": False},
        "cluster": {"gpus_per_node": recipe.cluster.gpus_per_node, "num_nodes": recipe.cluster.num_nodes},
        "nemo_grpo": {
            "run_name": RUN,
            "runs_dir": str(folder),
            "task": recipe.task.model_dump(),
            "prompt": own.prompt.model_dump(),
            "engine": own.engine.model_dump() | {"log_samples": 0, "diagnostics_period": 0},
            "export": {"hf": False},
        },
    }
    return load_recipe_dict(tree)


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
