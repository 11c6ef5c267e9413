"""Rules about NeMo-RL: what it refuses only after GPUs are allocated, and what it does wrongly.

They hold for recipes with ``nemo_grpo.target: cluster``; see `registry`. Read from the source of NeMo-RL
0.7.0 and 7ea279abf and of the megatron-core, Megatron-Bridge and vLLM that they pin.
"""

import os
from collections.abc import Iterator

from nemo_grpo.recipe.recipe import Recipe
from nemo_grpo.recipe.registry import Scope, rule
from nemo_grpo.recipe.rules import disagreement
from nemo_grpo.recipe.sections import GENERATION, MEGATRON, PACKING

OVERLAP = f"{MEGATRON}.distributed_data_parallel_config.overlap_param_gather"
TP_CHECK_OFF = "NRL_IGNORE_TP_ACCURACY_CHECK"
BLOCKWISE_ENV = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
RECOMPUTE_MODULES = frozenset(
    ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
)
"""Names that megatron-core's TransformerConfig.recompute_modules knows."""


@rule(Scope.CLUSTER)
def warm_start_is_for_the_embedded_engine(recipe: Recipe) -> Iterator[str]:
    if recipe.nemo_grpo.warm_start is not None:
        yield (
            "nemo_grpo.warm_start={..}: its model is made inside the embedded engine, and NeMo-RL loads a "
            "Hugging Face model; set it to null and name one in policy.model_name"
        )


@rule(Scope.CARE)
def leave_one_out_baseline_is_set(recipe: Recipe) -> Iterator[str]:
    if recipe.grpo.use_leave_one_out_baseline is None:
        yield (
            "grpo.use_leave_one_out_baseline=null: NeMo-RL's default is true, and its dynamic sampling then "
            "drops the only correct answer of a group; set it to false, as in every paper here"
        )


@rule(Scope.CLUSTER)
def logprob_batches_divide_the_step(recipe: Recipe) -> Iterator[str]:
    p, per_rank = recipe.policy, recipe.num_sequences_per_step // max(recipe.data_parallel_size, 1)
    if p.batches_by_tokens:
        return
    if per_rank % p.logprob_batch_size:
        yield (
            f"policy.logprob_batch_size={p.logprob_batch_size} does not divide the {per_rank} sequences of a "
            "step on one data-parallel rank: NeMo-RL scores whole microbatches without packing; use a "
            f"divisor, or {PACKING}.enabled=true"
        )


@rule(Scope.MEGATRON)
def context_parallel_needs_packing(recipe: Recipe) -> Iterator[str]:
    cp = recipe.policy.megatron_cfg.context_parallel_size
    if cp > 1 and not recipe.policy.sequence_packing.enabled:
        yield (
            f"{MEGATRON}.context_parallel_size={cp} works on packed sequences only; set "
            f"{PACKING}.enabled=true"
        )


@rule(Scope.CARE)
def sequence_padding_fits_the_layout(recipe: Recipe) -> Iterator[str]:
    given = recipe.policy.make_sequence_length_divisible_by
    multiple = recipe.policy.layout.sequence_multiple
    if given % multiple:
        yield (
            f"policy.make_sequence_length_divisible_by={given} is not a multiple of {multiple} (2 "
            f"CP, times TP with sequence_parallel), so a sequence cannot be split; use {multiple}"
        )


@rule(Scope.CLUSTER)
def dynamic_batching_excludes_packing_and_pipelines(recipe: Recipe) -> Iterator[str]:
    if not recipe.policy.dynamic_batching.enabled:
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


@rule(Scope.CARE)
def lora_modules_and_dtype_are_named(recipe: Recipe) -> Iterator[str]:
    peft = recipe.policy.megatron_cfg.lora_in_use
    if peft is None:
        return
    if not peft.target_modules:
        yield (
            f"{MEGATRON}.peft.target_modules=[] adapts every parallel linear, the output layer too; use "
            "[linear_qkv, linear_proj, linear_fc1, linear_fc2]"
        )
    if peft.lora_dtype not in (None, "float32", "bfloat16", "float16"):
        yield (
            f"{MEGATRON}.peft.lora_dtype={peft.lora_dtype} is a string that names no precision (NeMo-RL's "
            "base has the string None); use null"
        )


@rule(Scope.MEGATRON)
def fused_logprobs_exclude_other_settings(recipe: Recipe) -> Iterator[str]:
    g, m = recipe.policy.generation, recipe.policy.megatron_cfg
    if not m.use_fused_linear_logprobs:
        return
    clashes = {
        f"{PACKING}.enabled=true": recipe.policy.sequence_packing.enabled,
        f"{MEGATRON}.context_parallel_size={m.context_parallel_size}": m.context_parallel_size > 1,
        f"{GENERATION}.top_k={g.top_k}": g.top_k is not None,
        f"{GENERATION}.top_p={g.top_p}": g.top_p < 1,
        f"{OVERLAP}=true": m.distributed_data_parallel_config.overlap_param_gather,
        f"loss_fn.variant={recipe.loss_fn.variant}, which needs entropies": recipe.loss_fn.needs_entropy,
    }
    for setting in (setting for setting, clash in clashes.items() if clash):
        yield f"{MEGATRON}.use_fused_linear_logprobs=true does not work with {setting}; change one of them"


@rule(Scope.ADVICE)
def refit_sends_updated_weights(recipe: Recipe) -> Iterator[str]:
    m = recipe.policy.megatron_cfg
    overlaps = m.distributed_data_parallel_config.overlap_param_gather
    if recipe.nemo_grpo.target != "cluster" or not (m.enabled and overlaps):
        return
    shards = recipe.data_parallel_size * m.context_parallel_size  # megatron-core shards over both
    if m.expert_model_parallel_size > 1:  # experts' parameters shard over the ranks divided by EP and ETP
        stage = recipe.world_size // m.pipeline_model_parallel_size
        shards = max(shards, stage // (m.expert_model_parallel_size * m.layout.expert_tensor))
    if m.optimizer.use_distributed_optimizer and shards > 1:
        yield (
            f"{OVERLAP}=true (NeMo-RL's default): each of the {shards} ranks updates its own part of the "
            "weights, and a NeMo-RL without its pull request 4086 sends the others as they were before the "
            "step; the driver sets it to false there"
        )


@rule(Scope.MEGATRON)
def chunked_logprobs_need_deferred_fp32_logits(recipe: Recipe) -> Iterator[str]:
    chunk = recipe.policy.logprob_chunk_size
    if chunk is not None and not recipe.policy.megatron_cfg.defer_fp32_logits:
        yield f"policy.logprob_chunk_size={chunk} needs {MEGATRON}.defer_fp32_logits=true; set it"


@rule(Scope.MEGATRON)
def precision_is_bf16(recipe: Recipe) -> Iterator[str]:
    if recipe.policy.precision != "bfloat16":
        yield (
            f"policy.precision={recipe.policy.precision}: optimizer.bf16 and vLLM's precision are BF16 "
            "in NeMo-RL's base, and it refuses a mix; use bfloat16"
        )


@rule(Scope.CARE)
def blockwise_fp8_uses_fp32_scales(recipe: Recipe) -> Iterator[str]:
    fp8 = recipe.policy.megatron_cfg.fp8_in_use
    scales = (recipe.policy.megatron_cfg.env_vars or {}).get(BLOCKWISE_ENV, "null")
    if fp8 and fp8.fp8_recipe == "blockwise" and scales != "1":
        yield (
            f"{MEGATRON}.env_vars.{BLOCKWISE_ENV}={scales}: blockwise FP8 trains with FP32 scales, as the "
            'rollouts use; set it to "1"'
        )


@rule(Scope.CARE)
def parameters_stay_in_bf16(recipe: Recipe) -> Iterator[str]:
    fp8 = recipe.policy.megatron_cfg.fp8_in_use
    if fp8 and fp8.fp8_param:
        yield (
            f"{MEGATRON}.fp8_cfg.fp8_param=true: parameters kept in FP8 gave NaN logprobs with blockwise "
            "scaling in NeMo-RL; set it to false"
        )


@rule(Scope.MEGATRON)
def optimizer_settings_agree(recipe: Recipe) -> Iterator[str]:
    o, key = recipe.policy.megatron_cfg.optimizer, f"{MEGATRON}.optimizer"
    if o.use_precision_aware_optimizer and not (o.use_distributed_optimizer and o.optimizer == "adam"):
        yield (
            f"{key}.use_precision_aware_optimizer=true needs optimizer=adam and "
            f"use_distributed_optimizer=true, not {o.optimizer} and "
            f"{str(o.use_distributed_optimizer).lower()}; set it to false"
        )
    if o.optimizer_cpu_offload and not o.use_distributed_optimizer:
        yield f"{key}.optimizer_cpu_offload=true needs use_distributed_optimizer=true; set it"
    if o.optimizer_cpu_offload and o.optimizer_offload_fraction == 0:
        yield f"{key}.optimizer_offload_fraction=0.0 must be above 0 to offload; use 1.0"


@rule(Scope.MEGATRON)
def expert_parallel_divides_the_pipeline_stage(recipe: Recipe) -> Iterator[str]:
    m = recipe.policy.megatron_cfg
    etp = m.layout.expert_tensor
    stage = recipe.world_size // m.pipeline_model_parallel_size
    if stage % (m.expert_model_parallel_size * etp):
        yield (
            f"{MEGATRON}.expert_tensor_parallel_size={etp} x "
            f"expert_model_parallel_size={m.expert_model_parallel_size} does not divide the {stage} ranks of "
            "a pipeline stage; use 1"
        )


@rule(Scope.MEGATRON)
def recompute_modules_exist(recipe: Recipe) -> Iterator[str]:
    unknown = sorted(set(recipe.policy.megatron_cfg.recompute_modules or ()) - RECOMPUTE_MODULES)
    if unknown:
        yield (
            f"{MEGATRON}.recompute_modules={unknown}: NeMo-RL does not check the names and would recompute "
            f"nothing; use {', '.join(sorted(RECOMPUTE_MODULES))}"
        )


@rule(Scope.CLUSTER)
def loss_does_not_need_whole_groups(recipe: Recipe) -> Iterator[str]:
    if recipe.loss_fn.needs_whole_groups:
        yield (
            f"loss_fn.{recipe.loss_fn.whole_groups_key}=true needs one whole group per loss call; NeMo-RL "
            "splits groups over microbatches and ranks: set it to false, or train with the embedded engine"
        )


@rule(Scope.CLUSTER)
def logprob_and_training_batches_match_at_high_tp(recipe: Recipe) -> Iterator[str]:
    p = recipe.policy
    # models/policy/lm_policy.py asks for one of the three
    is_scored = not (recipe.loss_fn.force_on_policy_ratio or os.environ.get(TP_CHECK_OFF))
    if p.layout.tensor >= 4 and p.train_micro_batch_size != p.logprob_batch_size and is_scored:
        yield (
            f"policy.logprob_batch_size={p.logprob_batch_size} differs from "
            f"train_micro_batch_size={p.train_micro_batch_size}: with TP >= 4 the two then round differently "
            f"and NeMo-RL refuses to start; make them equal, or set {TP_CHECK_OFF}=1 in its environment"
        )


@rule(Scope.CLUSTER)
def no_other_advantage_estimator_is_set(recipe: Recipe) -> Iterator[str]:
    estimator = recipe.grpo.adv_estimator
    if recipe.loss_fn.is_stock or estimator is None:
        return
    for key in ("normalize_rewards", "use_leave_one_out_baseline"):
        given = getattr(estimator, key)
        if given not in (None, getattr(recipe.loss_fn, key, False)):
            yield disagreement(recipe, f"grpo.adv_estimator.{key}", key, given)
    if estimator.name != "grpo":
        yield (
            f"grpo.adv_estimator.name={estimator.name}: advantages come from loss_fn.variant="
            f"{recipe.loss_fn.variant}, which ignores this; leave it out"
        )


@rule(Scope.CLUSTER)
def shaped_advantages_are_not_clipped(recipe: Recipe) -> Iterator[str]:
    variant = recipe.loss_fn
    for key in ("advantage_clip_low", "advantage_clip_high"):
        value = getattr(recipe.grpo, key)
        if value is not None and not variant.is_stock and variant.found.shapes_advantages:
            yield (
                f"grpo.{key}={value:g} would clip advantages that {variant.variant} has shaped, and "
                "distort its loss; set it to null"
            )


@rule(Scope.CLUSTER)
def reference_policy_is_loaded(recipe: Recipe) -> Iterator[str]:
    if recipe.loss_fn.compares_with_reference and not getattr(
        recipe.loss_fn, "reference_policy_kl_penalty", 0
    ):
        yield (
            f"loss_fn.reference_policy_kl_penalty=0: {recipe.loss_fn.variant} needs the reference policy, "
            "which NeMo-RL loads only for a penalty above 0; use the paper's, or 1e-9 for almost none"
        )


@rule(Scope.CLUSTER)
def entropies_come_from_megatron(recipe: Recipe) -> Iterator[str]:
    """`nemorl.worker` extends NeMo-RL's Megatron worker; its DTensor worker returns no entropies."""
    if recipe.loss_fn.needs_entropy and recipe.policy.dtensor_cfg.enabled:
        yield (
            f"policy.dtensor_cfg.enabled=true: {recipe.loss_fn.variant} needs entropies, which only the "
            f"Megatron workers return; train with {MEGATRON}.enabled=true"
        )
