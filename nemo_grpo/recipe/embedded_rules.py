"""What the embedded engine cannot train, refused because it would otherwise be ignored. See `registry`."""

from collections.abc import Iterator
from dataclasses import dataclass

from nemo_grpo.recipe.megatron_sections import LORA_LAYERS, ModelOverrides, Section
from nemo_grpo.recipe.recipe import Recipe
from nemo_grpo.recipe.registry import Scope, rule
from nemo_grpo.recipe.sections import MEGATRON, PACKING
from nemo_grpo.support.dotted import value_of
from nemo_grpo.support.errors import as_yaml, did_you_mean
from nemo_grpo.tasks.prompts import IMAGES

RECOMPUTE_MODULES = ("core_attn", "mlp")
"""Parts of a dense decoder layer that can be recomputed separately."""

CLUSTER_HAS_IT = "remove it; only the cluster engine supports it"


@dataclass(frozen=True)
class ValueOf:
    """The value of another key."""

    key: str


@dataclass(frozen=True)
class Supported:
    """The values that the engine supports, and the remedy for any other."""

    values: tuple[object, ...]
    remedy: str = CLUSTER_HAS_IT
    where: str | None = None
    """Checked only if this key is true; None: always."""


OFF, UNSET, EMPTY = Supported((None, False)), Supported((None,)), Supported((None, {}))
_DECAY = Supported((ValueOf(f"{MEGATRON}.optimizer.weight_decay"),), "use optimizer.weight_decay's value")
_UNFILTERED = "rollouts are scored over all tokens; use {}, and {} to filter validation"
_PEFT, _FP8 = f"{MEGATRON}.peft", f"{MEGATRON}.fp8_cfg"
_LORA, _IN_FP8, _PACKED = f"{_PEFT}.enabled", f"{_FP8}.enabled", f"{PACKING}.enabled"

SUPPORTED: dict[str, Supported] = {
    "async_rl": UNSET,
    "checkpointing.checkpoint_must_save_by": UNSET,
    "checkpointing.ft_save_period": UNSET,
    "checkpointing.save_optimizer": Supported((True,), "use true"),
    "data.max_input_seq_length": UNSET,
    "data.use_multiple_dataloader": OFF,
    "env.should_use_nemo_gym": OFF,
    "grpo.adv_estimator": UNSET,
    "grpo.advantage_clip_high": UNSET,
    "grpo.advantage_clip_low": UNSET,
    "grpo.async_grpo.enabled": OFF,
    "grpo.batch_multiplier": Supported((None, 1)),
    "grpo.invalid_tool_call_advantage": UNSET,
    "grpo.malformed_thinking_advantage": UNSET,
    "grpo.max_num_epochs": Supported((None, 1)),
    "grpo.reward_scaling.enabled": OFF,
    "grpo.reward_shaping.stop_properly_penalty_coef": UNSET,
    "grpo.seq_logprob_error_threshold": UNSET,
    "grpo.val_start_at": Supported((None, -1)),
    "logger.swanlab_enabled": OFF,
    "nemo_grpo.engine.generator": Supported(("auto", "decoder", "hf"), "use auto"),
    "policy.draft.enabled": OFF,
    "policy.dtensor_cfg.enabled": OFF,
    "policy.dynamic_batching.enabled": OFF,
    "policy.generation.bad_words": Supported((None, [])),
    "policy.generation.quant_cfg": UNSET,
    "policy.generation.stop_strings": Supported((None, []), "use stop_token_ids"),
    "policy.generation.top_k": Supported((None,), _UNFILTERED.format("null", "val_top_k")),
    "policy.generation.top_p": Supported((1.0,), _UNFILTERED.format("1.0", "val_top_p")),
    "policy.hf_config_overrides": EMPTY,
    "policy.precision": Supported(("auto", "float32", "bfloat16"), "use auto, float32 or bfloat16"),
    "policy.pretrained_checkpoint": EMPTY,
    "policy.quant_cfg": UNSET,
    "policy.tokenizer.chat_template": Supported((None, "default")),
    "policy.tokenizer.chat_template_kwargs": EMPTY,
    "policy.tokenizer.name": Supported((None, ValueOf("policy.model_name")), "use policy.model_name's own"),
    f"{MEGATRON}.env_vars": EMPTY,
    f"{MEGATRON}.expert_model_parallel_size": Supported((1,), "use 1"),
    f"{MEGATRON}.mtp_num_layers": Supported((None, 0)),
    f"{MEGATRON}.optimizer.optimizer": Supported(("adam",), "use adam"),
    f"{MEGATRON}.optimizer.optimizer_cpu_offload": OFF,
    f"{MEGATRON}.optimizer.use_precision_aware_optimizer": Supported((False,)),
    f"{MEGATRON}.scheduler.end_weight_decay": _DECAY,
    f"{MEGATRON}.scheduler.start_weight_decay": _DECAY,
    f"{_FP8}.fp8_param": Supported((False,), "use false; parameters stay in BF16", _IN_FP8),
    f"{_FP8}.fp8_recipe": Supported(
        ("blockwise", "delayed", "tensorwise"), "use blockwise, delayed or tensorwise", _IN_FP8
    ),
    f"{_PEFT}.dropout": Supported((0.0,), "use 0", _LORA),
    f"{_PEFT}.lora_A_init_method": Supported(("xavier",), "use xavier", _LORA),
    f"{_PEFT}.lora_B_init_method": Supported(("zero",), "use zero", _LORA),
    f"{_PEFT}.lora_dtype": Supported((None, "None"), "use null, which is policy.precision", _LORA),
    f"{PACKING}.algorithm": Supported(("first_fit_decreasing",), "use first_fit_decreasing", _PACKED),
    f"{PACKING}.fuse_loss": Supported((None, False), "remove it", _PACKED),
    "reward_penalties": EMPTY,
}
"""Keys that change a run -> what the embedded engine supports."""


@rule(Scope.EMBEDDED)
def settings_are_supported(recipe: Recipe) -> Iterator[str]:
    for key, supported in SUPPORTED.items():
        value = value_of(recipe, key)
        values = [value_of(recipe, v.key) if isinstance(v, ValueOf) else v for v in supported.values]
        if value not in values and (supported.where is None or value_of(recipe, supported.where)):
            shown = "{..}" if isinstance(value, Section | dict) else as_yaml(value)
            yield f"{key}={shown} is not supported by the embedded engine: {supported.remedy}"


@rule(Scope.EMBEDDED)
def task_has_no_images(recipe: Recipe) -> Iterator[str]:
    task = recipe.nemo_grpo.task
    if task is not None and task.needs_images:
        yield f"nemo_grpo.task.name={task.name}: {IMAGES}"


@rule(Scope.EMBEDDED)
def turns_are_limited_by_the_task(recipe: Recipe) -> Iterator[str]:
    """1 is the default: nobody chose it."""
    turns, task = recipe.grpo.max_rollout_turns, recipe.nemo_grpo.task
    if task is not None and 1 < turns < task.num_turns:
        yield (
            f"grpo.max_rollout_turns={turns}: in the embedded engine a response to {task.name} takes up to "
            f"{task.num_turns} turns all the same; leave it out, and set the task's own limit"
        )


@rule(Scope.EMBEDDED)
def lora_adapts_layers_of_the_decoder(recipe: Recipe) -> Iterator[str]:
    peft = recipe.policy.megatron_cfg.lora_in_use
    if peft is None:
        return
    for name in (*peft.target_modules, *peft.exclude_modules):
        if name not in LORA_LAYERS:
            yield f"{_PEFT}: the embedded engine cannot adapt {name!r}; use {', '.join(LORA_LAYERS)}"
    if not peft.layers:
        yield f"{_PEFT}.exclude_modules={peft.exclude_modules} leaves no layer to adapt; shorten it"


@rule(Scope.EMBEDDED)
def selective_recompute_needs_activation_checkpointing(recipe: Recipe) -> Iterator[str]:
    m = recipe.policy.megatron_cfg
    if m.recompute_granularity == "selective" and not m.activation_checkpointing:
        yield (
            f"{MEGATRON}.recompute_granularity=selective acts only with "
            f"{MEGATRON}.activation_checkpointing=true; set it"
        )


@rule(Scope.EMBEDDED)
def recompute_modules_are_supported(recipe: Recipe) -> Iterator[str]:
    for module in recipe.policy.megatron_cfg.recompute_modules or ():
        if module not in RECOMPUTE_MODULES:
            yield (
                f"{MEGATRON}.recompute_modules: {module} is not supported by the embedded engine"
                f"{did_you_mean(module, RECOMPUTE_MODULES)}"
            )


@rule(Scope.EMBEDDED)
def model_overrides_are_supported(recipe: Recipe) -> Iterator[str]:
    overrides = recipe.policy.megatron_cfg.model_overrides or ModelOverrides()
    for name, value in (overrides.model_extra or {}).items():
        yield (
            f"{MEGATRON}.model_overrides.{name}={as_yaml(value)} is not supported by the embedded engine"
            f"{did_you_mean(name, ModelOverrides.model_fields)}"
        )


@rule(Scope.EMBEDDED)
def updates_hold_whole_groups(recipe: Recipe) -> Iterator[str]:
    if not recipe.loss_fn.needs_whole_groups:
        return
    size, group = recipe.policy.train_global_batch_size, recipe.grpo.num_generations_per_prompt
    if size % group or size // group < recipe.data_parallel_size:
        yield (
            f"loss_fn.{recipe.loss_fn.whole_groups_key}=true sums over whole groups: "
            f"policy.train_global_batch_size={size} must be a multiple of "
            f"grpo.num_generations_per_prompt={group}, with at least one group for each of the "
            f"{recipe.data_parallel_size} data-parallel ranks; use {recipe.num_sequences_per_step}"
        )
