"""Recipe keys that a rehearsal overrides to make a cluster recipe small and run without a GPU."""

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from nemo_grpo.recipe import Recipe
from nemo_grpo.recipe.loader import merge
from nemo_grpo.recipe.sections import GENERATION, MEGATRON, VLLM
from nemo_grpo.rehearsal.environment import uses_async_engine
from nemo_grpo.rehearsal.model import RehearsalModel
from nemo_grpo.rehearsal.replacements import CPU, OF_THE_FULL_MODEL, REHEARSAL, Replacement
from nemo_grpo.rehearsal.small_config import rehearsed_shape
from nemo_grpo.rehearsal.tiny_data import data_settings
from nemo_grpo.support.dotted import is_missing, set_value, value_of
from nemo_grpo.support.files import read_yaml
from nemo_grpo.tasks import TaskConfig

NUM_STEPS = 3
"""Steps of a rehearsal: two, a stop, and one after the resume."""
STOP_AFTER = 2
"""Step during which the driver is told to stop."""
NUM_SUPERVISED_STEPS = 50
"""Steps of a supervised rehearsal. They are so short that the stop takes effect some steps late."""
NUM_PROMPTS = 4
NUM_GENERATIONS = 4
NUM_VALIDATION = 4
CONSTANT: dict[str, dict[str, Any]] = read_yaml(Path(__file__).with_suffix(".yaml"))
"""Keys that do not depend on the recipe: for every rehearsal, and for a machine without a GPU."""
MICROBATCH = 2
"""Sequences of a microbatch, of which an update then has several."""


class Override(NamedTuple):
    """One key of the recipe that a rehearsal sets.

    Attributes:
        key: dotted.
        value: the value in place of the recipe's.
        reason: why this recipe's value cannot stay; empty for keys that every rehearsal sets.
    """

    key: str
    value: Any
    reason: str = ""


class Ranks(NamedTuple):
    """Logical ranks: tensor, pipeline, context, data and expert parallel sizes."""

    tp: int
    pp: int
    cp: int
    dp: int
    ep: int

    @property
    def number(self) -> int:
        """Number of all ranks."""
        return math.prod(self[:4])

    def __str__(self) -> str:
        sizes = zip(("TP", "PP", "CP", "DP", "EP"), self, strict=True)
        parts = [f"{name}{size}" for name, size in sizes if size > 1]
        return " ".join(parts) if parts else "one rank"


def ranks_of(recipe: Recipe) -> Ranks:
    """Return the recipe's ranks."""
    layout = recipe.policy.layout
    return Ranks(*layout.sizes, recipe.data_parallel_size, layout.expert)


def reduced_ranks(layout: Ranks, max_ranks: int) -> Ranks:
    """Reduce the sizes of a layout to 2 or 1.

    TP, PP, CP and DP, in this order, become 2 if they are above 1 and the ranks suffice, else 1. EP becomes 2
    if it is above 1 and divides the ranks of a pipeline stage.
    """
    sizes: list[int] = []
    for size in (layout.tp, layout.pp, layout.cp, layout.dp):
        suffices = 2 * math.prod(sizes) <= max_ranks
        sizes.append(2 if size > 1 and suffices else 1)
    tp, pp, cp, dp = sizes
    # EP must divide the number of ranks in a pipeline stage, over which the experts are spread.
    can_split_experts = (tp * cp * dp) % 2 == 0
    return Ranks(tp, pp, cp, dp, ep=2 if layout.ep > 1 and can_split_experts else 1)


def rehearsed_ranks(recipe: Recipe, max_ranks: int) -> Ranks:
    """Reduce the recipe's ranks; a dense model in place of one with experts has no expert parallelism."""
    layout = reduced_ranks(ranks_of(recipe), max_ranks)
    shape, _ = rehearsed_shape(recipe)
    return layout if shape.num_experts else layout._replace(ep=1)


def num_steps(recipe: Recipe) -> int:
    """Return the steps of the recipe's rehearsal."""
    return NUM_SUPERVISED_STEPS if recipe.loss_fn.learns_from_demonstrations else NUM_STEPS


def overrides_of(
    recipe: Recipe, task: TaskConfig, model: RehearsalModel, layout: Ranks, runs_dir: Path, uses_vllm: bool
) -> Iterator[Override]:
    """Yield everything that a rehearsal overrides.

    Args:
        recipe: as it would be submitted.
        task: the task of the rehearsal's problems.
        model: the small model.
        layout: the reduced layout.
        runs_dir: folder in which the run makes its own.
        uses_vllm: True if vLLM samples, False if the stand-in does.
    """
    run_dir = runs_dir / recipe.nemo_grpo.run_name
    always = {
        **CONSTANT["rehearsal"],
        **_loop(recipe),
        **_sizes(recipe, model),
        **_ranks(recipe, layout),
        **cpu_settings(model.context, uses_vllm),
        **data_settings(recipe, task),
        "nemo_grpo.run_name": recipe.nemo_grpo.run_name,
        "nemo_grpo.runs_dir": str(runs_dir),
        "checkpointing.checkpoint_dir": str(run_dir / "checkpoints"),
        "logger.log_dir": str(run_dir / "logs"),
    }
    yield from (Override(key, value) for key, value in always.items())
    yield from replaced(recipe, CPU)
    yield from replaced(recipe, REHEARSAL)
    yield from limited_to_the_model(recipe, model)
    yield from _replaced_parts(recipe)


def limited_to_the_model(recipe: Recipe, model: RehearsalModel) -> Iterator[Override]:
    """Yield the keys whose values belong to the full model's vocabulary, layers, experts or positions.

    No check would report a number beyond the small model, such as a token id: NeMo-RL's workers would fail
    somewhere in their own code, or train on empty responses. `_sizes` sets the lengths, and `small_config`
    the model's own numbers.
    """
    for key in ("top_k", "val_top_k"):
        top_k = getattr(recipe.policy.generation, key)
        if top_k is not None and top_k > model.vocab_size:
            # NeMo-RL indexes the sorted logits by vocabulary size - top_k, which must not be negative.
            reason = f"the small model has {model.vocab_size} tokens"
            yield Override(f"{GENERATION}.{key}", model.vocab_size, reason)
    yield from replaced(recipe, OF_THE_FULL_MODEL)


def replaced(recipe: Recipe, replacements: Mapping[str, Replacement]) -> Iterator[Override]:
    """Yield the replacement of each key that the recipe sets to another value; null counts as unset."""
    for key, replacement in replacements.items():
        if value_of(recipe, key) not in (None, replacement.value):
            yield Override(key, replacement.value, replacement.reason)


def _replaced_parts(recipe: Recipe) -> Iterator[Override]:
    """Yield the keys of parts that this stack does not have, and of those that a rehearsal changes."""
    policy = recipe.policy
    if policy.dtensor_cfg.enabled:
        reason = "there is no nemo-automodel here: Megatron-core trains in its place"
        yield Override("policy.dtensor_cfg.enabled", False, reason)
        yield Override(f"{MEGATRON}.enabled", True, reason)
        if policy.logprob_chunk_size is not None and not value_of(recipe, f"{MEGATRON}.defer_fp32_logits"):
            reason = "Megatron-core scores in chunks of policy.logprob_chunk_size only so"
            yield Override(f"{MEGATRON}.defer_fp32_logits", True, reason)
        if policy.layout.context > 1 and not policy.sequence_packing.enabled:
            reason = "Megatron-core splits packed sequences only"
            yield Override("policy.dynamic_batching.enabled", False, reason)
            yield Override("policy.sequence_packing.enabled", True, reason)
    if policy.generation.backend != "vllm" and uses_async_engine(recipe):
        yield Override(f"{VLLM}.async_engine", True, "asynchronous rollouts by vLLM")
    optimizer = policy.megatron_cfg.optimizer.optimizer
    if optimizer not in ("adam", "sgd"):
        yield Override(f"{MEGATRON}.optimizer.optimizer", "adam", f"{optimizer} is not in this stack")
    if not recipe.checkpointing.enabled and value_of(recipe, "checkpointing.model_save_format"):
        # NeMo-RL refuses a format at a save with dtensor_cfg._v2=false, and a rehearsal saves. A recipe that
        # saves keeps it, because its job would fail, too.
        yield Override("checkpointing.model_save_format", None, "the recipe never saves")
    if recipe.uses_data_plane and value_of(recipe, "data_plane.backend", "simple") != "simple":
        yield Override("data_plane.backend", "simple", "mooncake is not in this stack")
    if (recipe.checkpointing.metric_name or "").startswith("val:"):
        yield Override("checkpointing.metric_name", None, "stopped and saved where nothing is validated")


def num_validation(recipe: Recipe) -> int:
    """Count the validation problems of a rehearsal, one of each set at least."""
    return max(NUM_VALIDATION, len(getattr(recipe.nemo_grpo.task, "validation_sets", ())))


def _loop(recipe: Recipe) -> dict[str, Any]:
    """Return the keys of steps, batches and validations."""
    grpo = recipe.grpo
    num_generations = min(grpo.num_generations_per_prompt, NUM_GENERATIONS)
    num_updates = min(recipe.num_updates_per_step, 2)
    # NeMo-RL 7ea279abf removes a checkpoint whose step is no multiple of save_period. With 1 the checkpoint
    # of the stop remains, from which tests recompute the next step. A supervised run has too many steps to
    # save each of them.
    is_supervised = recipe.loss_fn.learns_from_demonstrations
    save_period = num_steps(recipe) if is_supervised else 1
    settings: dict[str, Any] = {
        "grpo.num_prompts_per_step": NUM_PROMPTS,
        "grpo.num_generations_per_prompt": num_generations,
        "policy.train_global_batch_size": NUM_PROMPTS * num_generations // num_updates,
        "grpo.max_num_steps": num_steps(recipe),
        "checkpointing.save_period": save_period,
    }
    if recipe.async_rl is not None:
        comes_in_chunks = recipe.async_rl.min_groups_for_streaming_train < grpo.num_prompts_per_step
        settings["async_rl.min_groups_for_streaming_train"] = 1 if comes_in_chunks else NUM_PROMPTS
        settings["async_rl.max_inflight_prompts"] = NUM_PROMPTS
    if grpo.validates:
        settings["grpo.val_at_end"] = True
        # One batch, so that every problem is validated once.
        settings["grpo.max_val_samples"] = num_validation(recipe)
        settings["grpo.val_batch_size"] = num_validation(recipe)
    return settings


def _sizes(recipe: Recipe, model: RehearsalModel) -> dict[str, Any]:
    """Return the keys of the model's folder and of lengths."""
    policy = recipe.policy
    response = model.max_new_tokens
    longest = model.context
    settings: dict[str, Any] = {
        "policy.model_name": str(model.folder),
        "policy.tokenizer.name": str(model.folder),
        f"{GENERATION}.max_new_tokens": response,
        "policy.max_total_sequence_length": longest,
        f"{VLLM}.max_model_len": longest,
        "policy.train_micro_batch_size": min(policy.train_micro_batch_size, MICROBATCH),
        "policy.logprob_batch_size": min(policy.logprob_batch_size, MICROBATCH),
    }
    if recipe.data.max_input_seq_length is not None:
        settings["data.max_input_seq_length"] = model.max_prompt_tokens
    for key in ("train_mb_tokens", "logprob_mb_tokens"):
        if getattr(policy.sequence_packing, key) is not None:
            settings[f"policy.sequence_packing.{key}"] = MICROBATCH * longest
    if recipe.grpo.reward_shaping.enabled:
        settings["grpo.reward_shaping.max_response_length"] = response
        settings["grpo.reward_shaping.overlong_buffer_length"] = response // 4
    if getattr(recipe.loss_fn, "max_response_length", None) is not None:
        settings["loss_fn.max_response_length"] = response
    return settings


def _ranks(recipe: Recipe, layout: Ranks) -> dict[str, Any]:
    """Return the keys of parallel sizes and GPUs."""
    settings: dict[str, Any] = {
        f"{MEGATRON}.tensor_model_parallel_size": layout.tp,
        f"{MEGATRON}.pipeline_model_parallel_size": layout.pp,
        f"{MEGATRON}.context_parallel_size": layout.cp,
        f"{MEGATRON}.expert_model_parallel_size": layout.ep,
        f"{MEGATRON}.sequence_parallel": recipe.policy.megatron_cfg.sequence_parallel and layout.tp > 1,
        "cluster.gpus_per_node": layout.number,
    }
    if recipe.num_rollout_gpus:
        # Rollouts on GPUs of their own: one more, for the only engine.
        settings["cluster.gpus_per_node"] = layout.number + 1
        settings[f"{GENERATION}.colocated.resources"] = {"gpus_per_node": 1, "num_nodes": None}
    return settings


def cpu_settings(context: int, uses_vllm: bool) -> dict[str, Any]:
    """Return the keys that a machine without a GPU needs.

    Args:
        context: maximum tokens of a prompt with its response.
        uses_vllm: True if vLLM samples, False if the stand-in does.
    """
    settings = dict(CONSTANT["cpu"])
    if uses_vllm:
        settings[f"{GENERATION}.vllm_kwargs"] = {
            "kv_cache_memory_bytes": 1 << 28,
            "max_num_batched_tokens": max(8 * context, 2048),
            "max_num_seqs": 64,
        }
    return settings


def write_recipe(path: Path, recipe: Recipe, changed: Iterable[Override]) -> None:
    """Write the recipe's source with the changes on top, interpolations unresolved."""
    tree = merge({}, recipe.source.tree)
    if not is_missing(tree, "loss_fn.variant"):
        # The merged tree does not show which keys of loss_fn are NeMo-RL's defaults, so write the section as
        # the recipe has resolved it.
        tree["loss_fn"] = recipe.settings["loss_fn"]
    for change in changed:
        set_value(tree, change.key, change.value)
    path.write_text(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True), encoding="utf-8")
