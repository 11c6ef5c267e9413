"""From a recipe to the parts of a run. What a recipe asks for and this engine lacks is refused here."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from nemo_grpo.engine.generate_distributed import DistributedGenerator
from nemo_grpo.engine.generate_hf import HFGenerator
from nemo_grpo.engine.hf_folder import check_model_folder, load_config, load_weights
from nemo_grpo.engine.megatron import options
from nemo_grpo.engine.megatron.layers import transformer_engine_is_installed
from nemo_grpo.engine.megatron.lora import LoRASettings, choose_targets
from nemo_grpo.engine.megatron.parallel import Layout
from nemo_grpo.engine.megatron.policy import MegatronPolicy, OptimizerSettings
from nemo_grpo.engine.protocols import Generator, SamplingParams
from nemo_grpo.engine.rollout import OverlongPenalty
from nemo_grpo.engine.warm_start import warm_start
from nemo_grpo.errors import UserError, did_you_mean
from nemo_grpo.evaluate.runner import ks
from nemo_grpo.recipe import Recipe
from nemo_grpo.recipe.sections import metric_key
from nemo_grpo.tasks import Task

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def check_supported(recipe: Recipe) -> None:
    """Refuse what this engine would ignore.

    Raises: UserError: naming key, value and remedy.
    """
    policy, megatron = recipe.policy, recipe.policy.megatron_cfg
    allowed: list[tuple[str, object, tuple[object, ...], str]] = [
        (
            "policy.megatron_cfg.expert_model_parallel_size",
            megatron.expert_model_parallel_size,
            (1,),
            "use 1",
        ),
        ("policy.sequence_packing.enabled", policy.sequence_packing.enabled, (False,), "use false"),
        ("policy.megatron_cfg.optimizer.optimizer", megatron.optimizer.optimizer, ("adam",), "use adam"),
        ("policy.precision", policy.precision, ("float32", "bfloat16"), "use float32 or bfloat16"),
        ("policy.generation.stop_strings", policy.generation.stop_strings, (None, []), "use stop_token_ids"),
        ("nemo_grpo.engine.generator", recipe.nemo_grpo.engine.generator, ("hf",), "use hf"),
        ("checkpointing.save_optimizer", recipe.checkpointing.save_optimizer, (True,), "use true"),
        (
            "policy.tokenizer.name",
            policy.tokenizer.name,
            (None, policy.model_name),
            "use policy.model_name's own",
        ),
        *_would_be_ignored(recipe),
        *_lora_rules(recipe),
    ]
    errors = [
        f"{key}={value} is not supported by the embedded engine: {remedy}"
        for key, value, good, remedy in allowed
        if value not in good
    ]
    errors += options.recompute_refusals(megatron)
    errors += options.override_refusals(megatron)
    errors += options.fp8_refusals(megatron, options.this_machine())
    if errors:
        raise UserError("; ".join(errors))
    if lora_of(recipe) is not None and torch.cuda.is_available() and transformer_engine_is_installed():
        raise UserError(
            "policy.megatron_cfg.peft.enabled=true: LoRA needs megatron-core's local layers, and Transformer "
            "Engine is installed; use an environment without it"
        )


def _lora_rules(recipe: Recipe) -> list[tuple[str, object, tuple[object, ...], str]]:
    peft = recipe.policy.megatron_cfg.peft
    if peft is None or not peft.enabled:
        return []
    section = "policy.megatron_cfg.peft"
    return [
        (f"{section}.dropout", peft.dropout, (0.0,), "use 0"),
        (f"{section}.lora_A_init_method", peft.lora_A_init_method, ("xavier",), "use xavier"),
        (f"{section}.lora_B_init_method", peft.lora_B_init_method, ("zero",), "use zero"),
        (f"{section}.lora_dtype", peft.lora_dtype, (None, "None"), "use null, which is policy.precision"),
    ]


def lora_of(recipe: Recipe) -> LoRASettings | None:
    """The recipe's LoRA settings; None: all weights are trained.

    Raises: UserError: layers that cannot be adapted.
    """
    peft = recipe.policy.megatron_cfg.peft
    if peft is None or not peft.enabled:
        return None
    return LoRASettings(peft.dim, peft.alpha, choose_targets(peft.target_modules, peft.exclude_modules))


def layout_of(recipe: Recipe) -> Layout:
    """The recipe's model-parallel layout."""
    m = recipe.policy.megatron_cfg
    extra = m.model_extra or {}
    return Layout(
        tensor=m.tensor_model_parallel_size,
        pipeline=m.pipeline_model_parallel_size,
        context=m.context_parallel_size,
        sequence_parallel=m.sequence_parallel,
        num_layers_in_first_stage=extra.get("num_layers_in_first_pipeline_stage"),
        num_layers_in_last_stage=extra.get("num_layers_in_last_pipeline_stage"),
    )


def check_layout(recipe: Recipe) -> None:
    """Refuse a layout that does not divide the model of policy.model_name; the recipe has checked all others.

    Raises: UserError: naming key, value and the sizes that fit.
    """
    if recipe.policy.model_name is None:
        return
    hf, layout = load_config(Path(recipe.policy.model_name)), layout_of(recipe)
    even = layout.num_layers_in_first_stage is None and layout.num_layers_in_last_stage is None
    for key, size, what in (
        ("tensor_model_parallel_size", layout.tensor, "num_attention_heads"),
        ("tensor_model_parallel_size", layout.tensor, "num_key_value_heads"),
        ("tensor_model_parallel_size", layout.tensor, "intermediate_size"),
        ("pipeline_model_parallel_size", layout.pipeline if even else 1, "num_hidden_layers"),
    ):
        number = getattr(hf, what)
        if number % size:
            fitting = ", ".join(str(n) for n in range(1, min(number, 64) + 1) if number % n == 0)
            raise UserError(
                f"policy.megatron_cfg.{key}={size} does not divide the model's {what}={number}; use "
                f"one of {fitting}"
            )
    if _enabled(recipe.policy.megatron_cfg.fp8_cfg):
        errors = list(options.fp8_width_refusals(hf, layout.tensor))
        if errors:
            raise UserError("; ".join(errors))


def check_ranks(recipe: Recipe) -> None:
    """Refuse a launch whose number of processes is not the recipe's.

    Raises: UserError: see above.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != recipe.world_size:
        raise UserError(
            f"cluster.gpus_per_node={recipe.cluster.gpus_per_node} x cluster.num_nodes="
            f"{recipe.cluster.num_nodes} are {recipe.world_size} ranks, but {launched} were launched; make "
            "them agree"
        )


_NEUTRAL: dict[str, tuple[object, ...]] = {
    "grpo.adv_estimator": (None,),
    "grpo.advantage_clip_high": (None,),
    "grpo.advantage_clip_low": (None,),
    "grpo.async_grpo.enabled": (None, False),
    "grpo.batch_multiplier": (None, 1),
    "grpo.max_num_epochs": (None, 1),
    "grpo.reward_scaling.enabled": (None, False),
    "grpo.reward_shaping.stop_properly_penalty_coef": (None,),
    "grpo.seq_logprob_error_threshold": (None,),
    "grpo.val_start_at": (None, -1),
    "checkpointing.checkpoint_must_save_by": (None,),
    "logger.mlflow_enabled": (None, False),
    "logger.swanlab_enabled": (None, False),
    "logger.wandb_enabled": (None, False),
    "policy.hf_config_overrides": (None, {}),
    "policy.dynamic_batching.enabled": (None, False),
    "reward_penalties": (None,),
}
"""NeMo-RL's keys that change a run and that this engine lacks -> the values at which they do not."""


def check_metric_names(recipe: Recipe) -> None:
    """Refuse a metric that no validation will ever have.

    Raises: UserError: naming the nearest that it has.
    """
    k = recipe.grpo.val_num_generations_per_prompt
    names = [
        "accuracy",
        "greedy",
        f"maj@{k}",
        "format",
        "truncated",
        "num_tokens",
        *(f"pass@{n}" for n in ks(k)),
    ]
    known = [f"validation/{name}" for name in names]
    given = {
        "checkpointing.metric_name": recipe.checkpointing.metric_key,
        "grpo.stop_at_validation_metric": metric_key(recipe.grpo.stop_at_validation_metric),
    }
    for key, metric in given.items():
        if metric is not None and metric not in known:
            raise UserError(f"{key}: validation has no metric {metric!r}{did_you_mean(metric, known)}")


def _would_be_ignored(recipe: Recipe) -> Iterator[tuple[str, object, tuple[object, ...], str]]:
    tree = recipe.to_dict()
    for key, neutral in _NEUTRAL.items():
        value: Any = tree
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        yield key, value, neutral, "remove it; the cluster engine has it"
    scheduler = recipe.policy.megatron_cfg.scheduler
    weight_decay = recipe.policy.megatron_cfg.optimizer.weight_decay
    for name in ("start_weight_decay", "end_weight_decay"):
        key = f"policy.megatron_cfg.scheduler.{name}"
        yield key, getattr(scheduler, name), (weight_decay,), "use optimizer.weight_decay's value"


def _enabled(section: Any) -> bool:
    return section is not None and section.enabled


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


def check_model_source(recipe: Recipe) -> None:
    """Refuse a model folder that is incomplete, before anything is made.

    Raises: UserError: see `check_model_folder`.
    """
    if recipe.policy.model_name is not None:
        check_model_folder(Path(recipe.policy.model_name), "policy.model_name")


def model_source(recipe: Recipe, task: Task) -> Path:
    """The folder to start from: policy.model_name, or the warm-started model, made if the cache has none."""
    if recipe.policy.model_name is not None:
        return Path(recipe.policy.model_name)
    assert recipe.nemo_grpo.warm_start is not None
    return warm_start(recipe.nemo_grpo.warm_start, task, recipe.nemo_grpo.prompt)


def build_policy(recipe: Recipe, source: Path, *, keep_reference: bool) -> MegatronPolicy:
    """The policy with the source's weights."""
    optimizer, scheduler = recipe.policy.megatron_cfg.optimizer, recipe.policy.megatron_cfg.scheduler
    num_updates = recipe.grpo.max_num_steps * recipe.num_updates_per_step
    settings = OptimizerSettings(
        lr=optimizer.lr,
        min_lr=optimizer.min_lr,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.adam_beta1,
        adam_beta2=optimizer.adam_beta2,
        adam_eps=optimizer.adam_eps,
        clip_grad=optimizer.clip_grad,
        use_distributed_optimizer=optimizer.use_distributed_optimizer,
        lr_decay_style=scheduler.lr_decay_style,
        lr_decay_iters=scheduler.lr_decay_iters or max(num_updates, scheduler.lr_warmup_iters + 1),
        lr_warmup_iters=scheduler.lr_warmup_iters,
        lr_warmup_init=scheduler.lr_warmup_init,
    )
    policy = MegatronPolicy(
        load_config(source),
        settings,
        layout=layout_of(recipe),
        dtype=DTYPES[recipe.policy.precision],
        device=choose_device(recipe),
        seed=recipe.grpo.seed,
        lora=lora_of(recipe),
        config_fields=options.config_fields(recipe.policy.megatron_cfg),
    )
    policy.load_weights(load_weights(source), keep_reference=keep_reference)
    return policy


def build_generator(recipe: Recipe, source: Path) -> Generator:
    """The sampler, shared between the ranks; its weights come from the policy."""
    generator = HFGenerator(
        load_config(source),
        dtype=DTYPES[recipe.policy.precision],
        device=choose_device(recipe),
        max_batch_size=recipe.policy.generation_batch_size,
    )
    return DistributedGenerator(generator) if recipe.world_size > 1 else generator


def training_sampling(recipe: Recipe, tokenizer: Any) -> SamplingParams:
    """How rollouts are sampled."""
    generation = recipe.policy.generation
    return SamplingParams(
        max_new_tokens=generation.max_new_tokens,
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k,
        stop_token_ids=stop_token_ids(recipe, tokenizer),
    )


def validation_sampling(recipe: Recipe, tokenizer: Any) -> SamplingParams:
    """How validation samples; val_temperature 0 is greedy."""
    generation = recipe.policy.generation
    return SamplingParams(
        max_new_tokens=generation.max_new_tokens,
        temperature=generation.val_temperature or 1.0,
        top_p=generation.val_top_p,
        stop_token_ids=stop_token_ids(recipe, tokenizer),
        greedy=generation.val_temperature == 0,
    )


def stop_token_ids(recipe: Recipe, tokenizer: Any) -> tuple[int, ...]:
    """The tokenizer's end of sequence and the recipe's further stop tokens."""
    return (tokenizer.eos_token_id, *(recipe.policy.generation.stop_token_ids or ()))


def overlong_penalty_of(recipe: Recipe) -> OverlongPenalty | None:
    """The recipe's soft length penalty, or None."""
    shaping = recipe.grpo.reward_shaping
    if not shaping.enabled:
        return None
    return OverlongPenalty(
        max_response_length=shaping.max_response_length,
        buffer_length=shaping.overlong_buffer_length,
        penalty=shaping.overlong_buffer_penalty,
    )
