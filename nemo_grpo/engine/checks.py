"""What the embedded engine refuses before it builds anything: settings it would ignore, unfit layouts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo_grpo.engine.hf_folder import check_model_folder, load_config
from nemo_grpo.engine.megatron import options
from nemo_grpo.engine.resume import check_same_run
from nemo_grpo.engine.run_folder import RunFolder
from nemo_grpo.engine.setup import choose_device, layout_of
from nemo_grpo.errors import UserError, did_you_mean
from nemo_grpo.evaluate.runner import ks
from nemo_grpo.recipe import Recipe
from nemo_grpo.recipe.sections import metric_key
from nemo_grpo.tasks.prompts import IMAGES


def check(recipe: Recipe, *, resume: bool) -> None:
    """Everything that can be refused without building anything.

    Raises: UserError: the recipe asks for what this engine or this machine does not have, or the run folder
            cannot be written or exists and ``resume`` is False.
    """
    check_supported(recipe)
    check_model_source(recipe)
    check_layout(recipe)
    choose_device(recipe)
    run = RunFolder(recipe.run_dir)
    run.check(resume=resume)
    if resume:
        check_same_run(recipe, run.recipe)
    elif any(recipe.checkpoint_dir.glob("step_*")):
        raise UserError(
            f"checkpointing.checkpoint_dir={recipe.checkpoint_dir} holds another run's checkpoints; add "
            "--resume to continue it, or choose another folder"
        )


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
        *_packing_rules(recipe),
        ("policy.megatron_cfg.optimizer.optimizer", megatron.optimizer.optimizer, ("adam",), "use adam"),
        ("policy.precision", policy.precision, ("float32", "bfloat16"), "use float32 or bfloat16"),
        ("policy.generation.stop_strings", policy.generation.stop_strings, (None, []), "use stop_token_ids"),
        (
            "nemo_grpo.engine.generator",
            recipe.nemo_grpo.engine.generator,
            ("auto", "decoder", "hf"),
            "use auto",
        ),
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
    if recipe.nemo_grpo.task.needs_images:
        errors.append(f"nemo_grpo.task.name={recipe.nemo_grpo.task.name}: {IMAGES}")
    errors += options.recompute_refusals(megatron)
    errors += options.override_refusals(megatron)
    errors += options.fp8_refusals(megatron, options.this_machine())
    if errors:
        raise UserError("; ".join(errors))


def _packing_rules(recipe: Recipe) -> list[tuple[str, object, tuple[object, ...], str]]:
    packing = recipe.policy.sequence_packing
    if not packing.enabled:
        return []
    section = "policy.sequence_packing"
    name, fused = "first_fit_decreasing", (packing.model_extra or {}).get("fuse_loss")
    return [
        (f"{section}.algorithm", packing.algorithm, (name,), f"use {name}"),
        (f"{section}.fuse_loss", fused, (None, False), "remove it"),
    ]


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


_NEUTRAL: dict[str, tuple[object, ...]] = {
    "grpo.adv_estimator": (None,),
    "grpo.advantage_clip_high": (None,),
    "grpo.advantage_clip_low": (None,),
    "grpo.async_grpo.enabled": (None, False),
    "grpo.batch_multiplier": (None, 1),
    "grpo.invalid_tool_call_advantage": (None,),
    "grpo.malformed_thinking_advantage": (None,),
    "grpo.max_num_epochs": (None, 1),
    "grpo.reward_scaling.enabled": (None, False),
    "grpo.reward_shaping.stop_properly_penalty_coef": (None,),
    "grpo.seq_logprob_error_threshold": (None,),
    "grpo.val_start_at": (None, -1),
    "checkpointing.checkpoint_must_save_by": (None,),
    "logger.mlflow_enabled": (None, False),
    "logger.swanlab_enabled": (None, False),
    "logger.wandb_enabled": (None, False),
    "policy.draft.enabled": (None, False),
    "policy.dynamic_batching.enabled": (None, False),
    "policy.hf_config_overrides": (None, {}),
    "policy.megatron_cfg.env_vars": (None, {}),
    "policy.megatron_cfg.mtp_num_layers": (None, 0),
    "policy.megatron_cfg.optimizer.optimizer_cpu_offload": (None, False),
    "policy.megatron_cfg.optimizer.use_precision_aware_optimizer": (False,),
    "policy.tokenizer.chat_template": (None, "default"),
    "policy.tokenizer.chat_template_kwargs": (None, {}),
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
    fp8 = recipe.policy.megatron_cfg.fp8_cfg
    if fp8 is not None and fp8.enabled:
        errors = list(options.fp8_width_refusals(hf, layout, fp8.fp8_recipe))
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


def check_model_source(recipe: Recipe) -> None:
    """Refuse a model folder that is incomplete, before anything is made.

    Raises: UserError: see `check_model_folder`.
    """
    if recipe.policy.model_name is not None:
        check_model_folder(Path(recipe.policy.model_name), "policy.model_name")
