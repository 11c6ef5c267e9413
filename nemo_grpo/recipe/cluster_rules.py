"""Rules about NeMo-RL: what it refuses only after GPUs are allocated, and what it lets through wrongly.

They hold for recipes with ``nemo_grpo.target: cluster``, wherever such a recipe is loaded. Read from the
source of NeMo-RL 0.7.0 and 7ea279abf and of the megatron-core, Megatron-Bridge and vLLM that they pin.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_grpo.recipe.recipe import Recipe

MEGATRON, GENERATION = "policy.megatron_cfg", "policy.generation"
VLLM, PACKING = "policy.generation.vllm_cfg", "policy.sequence_packing"
OVERLAP = f"{MEGATRON}.distributed_data_parallel_config.overlap_param_gather"
BLOCKWISE_ENV = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
RECOMPUTE_MODULES = frozenset(
    ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
)
"""Names that megatron-core's TransformerConfig.recompute_modules knows."""


def value_of(recipe: Recipe, key: str, default: Any = None) -> Any:
    """The value of a dotted key, typed by us or not; ``default`` where it is not given or null."""
    node: Any = recipe
    for name in key.split("."):
        node = node.get(name) if isinstance(node, Mapping) else getattr(node, name, None)
    return default if node is None else node


def uses_fp8(recipe: Recipe) -> bool:
    """True if the policy trains in FP8 or samples in it."""
    fp8 = recipe.policy.megatron_cfg.fp8_cfg
    return (fp8 is not None and fp8.enabled) or value_of(recipe, f"{VLLM}.precision") == "fp8"


def model_comes_from_the_hub(recipe: Recipe) -> Iterator[str]:
    if recipe.nemo_grpo.warm_start is not None:
        yield (
            "nemo_grpo.warm_start={..}: its model is made inside the embedded engine, and NeMo-RL loads a "
            "Hugging Face model; set it to null and name one in policy.model_name"
        )


def leave_one_out_is_decided(recipe: Recipe) -> Iterator[str]:
    if recipe.grpo.use_leave_one_out_baseline is None:
        yield (
            "grpo.use_leave_one_out_baseline=null: NeMo-RL's default is true, and its dynamic sampling then "
            "drops the only right answer of a group; set it to false, as every paper here has it"
        )


def scoring_batches_are_whole(recipe: Recipe) -> Iterator[str]:
    p, per_rank = recipe.policy, recipe.num_sequences_per_step // max(recipe.data_parallel_size, 1)
    if p.sequence_packing.enabled or value_of(recipe, "policy.dynamic_batching.enabled"):
        return
    if per_rank % p.logprob_batch_size:
        yield (
            f"policy.logprob_batch_size={p.logprob_batch_size} does not divide the {per_rank} sequences of a "
            "step on one data-parallel rank: NeMo-RL scores whole microbatches without packing; use a "
            f"divisor, or {PACKING}.enabled=true"
        )


def context_parallel_is_packed(recipe: Recipe) -> Iterator[str]:
    cp = recipe.policy.megatron_cfg.context_parallel_size
    if cp > 1 and not recipe.policy.sequence_packing.enabled:
        yield (
            f"{MEGATRON}.context_parallel_size={cp} works on packed sequences only; set "
            f"{PACKING}.enabled=true"
        )


def sequences_are_padded_for_the_layout(recipe: Recipe) -> Iterator[str]:
    m = recipe.policy.megatron_cfg
    factor = 2 * m.context_parallel_size if m.context_parallel_size > 1 else 1
    factor *= m.tensor_model_parallel_size if m.sequence_parallel else 1
    given = value_of(recipe, "policy.make_sequence_length_divisible_by", m.tensor_model_parallel_size)
    if given % factor:
        yield (
            f"policy.make_sequence_length_divisible_by={given} is not a multiple of {factor} (2 CP, times TP "
            f"with sequence_parallel), so a sequence cannot be split; use {factor}"
        )


def batching_is_of_one_kind(recipe: Recipe) -> Iterator[str]:
    if not value_of(recipe, "policy.dynamic_batching.enabled"):
        return
    pp = recipe.policy.megatron_cfg.pipeline_model_parallel_size
    if recipe.policy.sequence_packing.enabled:
        yield (
            f"policy.dynamic_batching.enabled=true excludes {PACKING}.enabled=true; keep packing, set the "
            "other to false"
        )
    if pp > 1:
        yield (
            "policy.dynamic_batching.enabled=true needs one pipeline stage, but "
            f"{MEGATRON}.pipeline_model_parallel_size={pp}; use {PACKING}.enabled=true instead"
        )


def lora_is_explicit(recipe: Recipe) -> Iterator[str]:
    peft = recipe.policy.megatron_cfg.peft
    if peft is None or not peft.enabled:
        return
    if not peft.target_modules:
        yield (
            f"{MEGATRON}.peft.target_modules=[] adapts every parallel linear, the output layer too; use "
            "[linear_qkv, linear_proj, linear_fc1, linear_fc2]"
        )
    if peft.lora_dtype not in (None, "float32", "bfloat16", "float16"):
        yield (
            f"{MEGATRON}.peft.lora_dtype={peft.lora_dtype} is a text that names no precision (NeMo-RL's base "
            "has such a None); use null"
        )


def fused_logprobs_stand_alone(recipe: Recipe) -> Iterator[str]:
    if not value_of(recipe, f"{MEGATRON}.use_fused_linear_logprobs"):
        return
    g, m = recipe.policy.generation, recipe.policy.megatron_cfg
    clashes = {
        f"{PACKING}.enabled=true": recipe.policy.sequence_packing.enabled,
        f"{MEGATRON}.context_parallel_size={m.context_parallel_size}": m.context_parallel_size > 1,
        f"{GENERATION}.top_k={g.top_k}": g.top_k is not None,
        f"{GENERATION}.top_p={g.top_p}": g.top_p < 1,
        f"{OVERLAP}=true": overlaps_param_gather(recipe),
    }
    for setting in (setting for setting, clash in clashes.items() if clash):
        yield f"{MEGATRON}.use_fused_linear_logprobs=true does not work with {setting}; give up one of them"


def overlaps_param_gather(recipe: Recipe) -> bool:
    """NeMo-RL's own base configurations set it, so a recipe that leaves it out has it."""
    return bool(value_of(recipe, OVERLAP, True))


def refit_sends_updated_weights(recipe: Recipe) -> Iterator[str]:
    m = recipe.policy.megatron_cfg
    if not (overlaps_param_gather(recipe) and m.optimizer.use_distributed_optimizer):
        return
    shards = recipe.data_parallel_size * m.context_parallel_size  # megatron-core shards over both
    if m.expert_model_parallel_size > 1:  # of the experts' parameters, over the ranks that EP and ETP leave
        stage = recipe.world_size // m.pipeline_model_parallel_size
        shards = max(shards, stage // (m.expert_model_parallel_size * expert_tensor_parallel_size(recipe)))
    if shards > 1:
        yield (
            f"{OVERLAP}=true (NeMo-RL's default): each of the {shards} ranks that share the distributed "
            "optimizer updates its own part of the weights, and the refit sends the others' as they were "
            "before the step (NeMo-RL pull request 4086); set it to false"
        )


def chunked_logprobs_defer_the_cast(recipe: Recipe) -> Iterator[str]:
    chunk = value_of(recipe, "policy.logprob_chunk_size")
    if chunk is not None and not value_of(recipe, f"{MEGATRON}.defer_fp32_logits"):
        yield f"policy.logprob_chunk_size={chunk} needs {MEGATRON}.defer_fp32_logits=true; set it"


def precision_is_bf16(recipe: Recipe) -> Iterator[str]:
    if recipe.policy.precision != "bfloat16":
        yield (
            f"policy.precision={recipe.policy.precision}: optimizer.bf16 and vLLM's precision stand at BF16 "
            "in NeMo-RL's base, and its checks refuse a mixture; use bfloat16"
        )


def fp8_training_is_complete(recipe: Recipe) -> Iterator[str]:
    fp8 = recipe.policy.megatron_cfg.fp8_cfg
    if fp8 is None or not fp8.enabled:
        return
    scales = value_of(recipe, f"{MEGATRON}.env_vars.{BLOCKWISE_ENV}", "null")
    if fp8.fp8_recipe == "blockwise" and str(scales) != "1":
        yield (
            f"{MEGATRON}.env_vars.{BLOCKWISE_ENV}={scales}: blockwise FP8 trains with FP32 scales, as the "
            'rollouts use; set it to "1"'
        )
    if fp8.fp8_param:
        yield (
            f"{MEGATRON}.fp8_cfg.fp8_param=true: parameters kept in FP8 gave NaN logprobs with blockwise "
            "scaling in NeMo-RL; set it to false"
        )


def optimizer_state_is_consistent(recipe: Recipe) -> Iterator[str]:
    o, key = recipe.policy.megatron_cfg.optimizer, f"{MEGATRON}.optimizer"
    offloads = value_of(recipe, f"{key}.optimizer_cpu_offload")
    fraction = value_of(recipe, f"{key}.optimizer_offload_fraction", 0.0)
    if o.use_precision_aware_optimizer and not (o.use_distributed_optimizer and o.optimizer == "adam"):
        yield (
            f"{key}.use_precision_aware_optimizer=true needs optimizer=adam and "
            f"use_distributed_optimizer=true, not {o.optimizer} and "
            f"{str(o.use_distributed_optimizer).lower()}; set it to false"
        )
    if offloads and not o.use_distributed_optimizer:
        yield f"{key}.optimizer_cpu_offload=true needs use_distributed_optimizer=true; set it"
    if offloads and not 0 < fraction <= 1:
        yield f"{key}.optimizer_offload_fraction={fraction} must be above 0, at most 1, to offload; use 1.0"


def expert_tensor_parallel_size(recipe: Recipe) -> int:
    """ETP; NeMo-RL's default is 1."""
    return int(value_of(recipe, f"{MEGATRON}.expert_tensor_parallel_size", 1))


def experts_fit_the_ranks(recipe: Recipe) -> Iterator[str]:
    m = recipe.policy.megatron_cfg
    etp = expert_tensor_parallel_size(recipe)
    stage = recipe.world_size // m.pipeline_model_parallel_size
    if stage % (m.expert_model_parallel_size * etp):
        yield (
            f"{MEGATRON}.expert_tensor_parallel_size={etp} x "
            f"expert_model_parallel_size={m.expert_model_parallel_size} does not divide the {stage} ranks of "
            "a pipeline stage; use 1"
        )


def recomputed_modules_exist(recipe: Recipe) -> Iterator[str]:
    unknown = sorted(set(recipe.policy.megatron_cfg.recompute_modules or ()) - RECOMPUTE_MODULES)
    if unknown:
        yield (
            f"{MEGATRON}.recompute_modules={unknown}: NeMo-RL does not check the names and would recompute "
            f"nothing; use some of {', '.join(sorted(RECOMPUTE_MODULES))}"
        )


def groups_may_be_split(recipe: Recipe) -> Iterator[str]:
    if getattr(recipe.loss_fn, "author_compat", False):
        yield (
            "loss_fn.author_compat=true needs one whole group per loss call; NeMo-RL splits groups over "
            "microbatches and ranks: set it to false, or train with the embedded engine"
        )


def exports_are_of_whole_models(recipe: Recipe) -> Iterator[str]:
    peft = recipe.policy.megatron_cfg.peft
    if recipe.nemo_grpo.export.at_every_save and peft is not None and peft.enabled:
        yield (
            "nemo_grpo.export.at_every_save=true: adapters are merged with the base model's files, which "
            "only you know; set it to false and run nemo-grpo convert megatron-to-hf --lora merge"
        )


def exports_have_a_converter(recipe: Recipe) -> Iterator[str]:
    task = recipe.nemo_grpo.task.name
    if recipe.nemo_grpo.export.at_every_save and task.startswith("vision_"):
        yield (
            f"nemo_grpo.export.at_every_save=true: nemo_grpo.task.name={task} trains a model that sees "
            "images, and the converters know none; set it to false"
        )


def checkpoints_are_ranked_by_a_metric(recipe: Recipe) -> Iterator[str]:
    c = recipe.checkpointing
    if c.metric_name is not None and not c.metric_name.startswith(("val:", "train:")):
        yield (
            f"checkpointing.metric_name={c.metric_name} must start with val: or train:, or NeMo-RL stops at "
            f"the first save; use val:{c.metric_name.rpartition('/')[2]}"
        )
    for key, value in (
        ("checkpointing.checkpoint_dir", c.checkpoint_dir),
        ("logger.log_dir", recipe.logger.log_dir),
    ):
        if value is None:
            yield f"{key}=null: NeMo-RL needs a folder; name one that every node sees"


def saves_meet_validations(recipe: Recipe) -> Iterator[str]:
    metric, save, val = (
        recipe.checkpointing.metric_name,
        recipe.checkpointing.save_period,
        recipe.grpo.val_period,
    )
    if metric is not None and metric.startswith("val:") and (val == 0 or save % val):
        yield (
            f"checkpointing.save_period={save} is not a multiple of grpo.val_period={val}: a checkpoint "
            f"without {metric} ranks last and is deleted; make it one, or set checkpointing.metric_name to "
            "null or train:reward"
        )


RULES = (
    model_comes_from_the_hub,
    leave_one_out_is_decided,
    scoring_batches_are_whole,
    context_parallel_is_packed,
    sequences_are_padded_for_the_layout,
    batching_is_of_one_kind,
    lora_is_explicit,
    fused_logprobs_stand_alone,
    refit_sends_updated_weights,
    chunked_logprobs_defer_the_cast,
    precision_is_bf16,
    fp8_training_is_complete,
    optimizer_state_is_consistent,
    experts_fit_the_ranks,
    recomputed_modules_exist,
    groups_may_be_split,
    exports_are_of_whole_models,
    exports_have_a_converter,
    checkpoints_are_ranked_by_a_metric,
    saves_meet_validations,
)
"""Every rule of this file."""
