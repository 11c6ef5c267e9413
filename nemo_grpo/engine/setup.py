"""From a recipe to the parts of a run."""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from nemo_grpo.core.reward_shaping import overlong_penalty
from nemo_grpo.engine.megatron import options
from nemo_grpo.engine.megatron.lora import LoRASettings, choose_targets
from nemo_grpo.engine.megatron.parallel import is_rank_zero
from nemo_grpo.engine.megatron.policy import MegatronPolicy
from nemo_grpo.engine.warm_start import warm_start
from nemo_grpo.errors import UserError
from nemo_grpo.hf_folder import load_config, load_weights
from nemo_grpo.recipe import Recipe
from nemo_grpo.sampling.generate_distributed import DistributedGenerator
from nemo_grpo.sampling.generators import build_local
from nemo_grpo.sampling.requests import Generator, SamplingParams
from nemo_grpo.tasks import Task

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def lora_of(recipe: Recipe) -> LoRASettings | None:
    """The recipe's LoRA settings; None: all weights are trained.

    Raises: UserError: layers that cannot be adapted.
    """
    peft = recipe.policy.megatron_cfg.lora_in_use
    if peft is None:
        return None
    return LoRASettings(peft.dim, peft.alpha, choose_targets(peft.target_modules, peft.exclude_modules))


def choose_device(recipe: Recipe) -> torch.device:
    """The recipe's device for this rank; ``auto`` is CUDA where there is one, and LOCAL_RANK says which.

    Raises: UserError: cuda is asked for and not there, there are fewer GPUs than ranks, or cpu is asked for
            where megatron-core sees a GPU.
    """
    wanted, found = recipe.nemo_grpo.engine.device, torch.cuda.is_available()
    if wanted == "cuda" and not found:
        raise UserError("nemo_grpo.engine.device=cuda: torch finds no CUDA device; use auto or cpu")
    if wanted == "cpu" and found:
        raise UserError(
            "nemo_grpo.engine.device=cpu: megatron-core uses a GPU that it sees; hide it with "
            "CUDA_VISIBLE_DEVICES= in the environment, or use auto"
        )
    if not found:
        return torch.device("cpu")
    local_rank, num_gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local_rank >= num_gpus:
        raise UserError(
            f"cluster.gpus_per_node={recipe.cluster.gpus_per_node}: rank {local_rank} of this node has no "
            f"GPU, torch finds {num_gpus}; use {num_gpus}"
        )
    return torch.device("cuda", local_rank)


def model_source(recipe: Recipe, task: Task) -> Path:
    """The folder to start from: policy.model_name, or the warm-started model, made if the cache has none.

    Every rank of a launch calls it.
    """
    if recipe.policy.model_name is not None:
        return Path(recipe.policy.model_name)
    assert recipe.nemo_grpo.warm_start is not None
    return warm_start(
        recipe.nemo_grpo.warm_start,
        task,
        recipe.nemo_grpo.prompt,
        layout=recipe.policy.megatron_cfg.layout,
        device=choose_device(recipe),
    )


def build_policy(recipe: Recipe, source: Path, *, keep_reference: bool) -> MegatronPolicy:
    """The policy with the source's weights."""
    megatron = recipe.policy.megatron_cfg
    if (hint := options.fp8_hint(megatron)) and is_rank_zero():
        log.warning("%s", hint)
    schedule = megatron.scheduler
    if schedule.lr_decay_iters is None:
        num_updates = recipe.grpo.max_num_steps * recipe.num_updates_per_step
        decay = max(num_updates, schedule.lr_warmup_iters + 1)
        schedule = schedule.model_copy(update={"lr_decay_iters": decay})
    policy = MegatronPolicy(
        load_config(source),
        megatron.optimizer,
        schedule,
        layout=megatron.layout,
        dtype=DTYPES[recipe.policy.precision],
        device=choose_device(recipe),
        seed=recipe.grpo.seed,
        lora=lora_of(recipe),
        config_fields=options.config_fields(megatron),
    )
    policy.load_weights(load_weights(source), keep_reference=keep_reference)
    return policy


def build_generator(recipe: Recipe, source: Path) -> Generator:
    """The sampler, shared between the ranks; its weights come from the policy."""
    assert recipe.nemo_grpo.engine.generator != "vllm"  # `checks` has refused it
    generator = build_local(
        recipe.nemo_grpo.engine.generator,
        load_config(source),
        DTYPES[recipe.policy.precision],
        choose_device(recipe),
        recipe.policy.generation_batch_size,
    )
    return DistributedGenerator(generator) if recipe.world_size > 1 else generator


def training_sampling(recipe: Recipe, ends: Sequence[int]) -> SamplingParams:
    """How rollouts are sampled; ``ends``: the model's `end_tokens`, beside the recipe's own."""
    generation = recipe.policy.generation
    return SamplingParams(
        max_new_tokens=generation.max_new_tokens,
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k,
        stop_token_ids=(*ends, *(generation.stop_token_ids or ())),
    )


def validation_sampling(recipe: Recipe, ends: Sequence[int]) -> SamplingParams:
    """How validation samples; val_temperature 0 is greedy."""
    generation = recipe.policy.generation
    return replace(
        training_sampling(recipe, ends),
        temperature=generation.val_temperature or 1.0,
        top_p=generation.val_top_p,
        top_k=generation.val_top_k,
        greedy=generation.val_temperature == 0,
    )


def overlong_penalty_of(recipe: Recipe) -> Callable[[Tensor], Tensor] | None:
    """The recipe's soft length penalty, or None."""
    shaping = recipe.grpo.reward_shaping
    if not shaping.enabled:
        return None
    return partial(
        overlong_penalty,
        max_response_length=shaping.max_response_length,
        buffer_length=shaping.overlong_buffer_length,
        penalty=shaping.overlong_buffer_penalty,
    )
