"""Limits on settings that NeMo-RL accepts at the cost of checkpoints, accuracy or rounding."""

from nemo_grpo.recipe import conditions
from nemo_grpo.recipe.registry import Scope
from nemo_grpo.recipe.rows import ABOVE_0, NOT_EMPTY, NOT_NULL, OFF, ON, Limit, Row, one_of

ROWS: tuple[Row, ...] = (
    Limit(
        "grpo.val_period",
        ABOVE_0,
        lambda recipe: (
            f"a checkpoint without {recipe.checkpointing.metric_name} ranks last and is deleted; validate "
            "now and then, or set checkpointing.metric_name to null or train:reward"
        ),
        Scope.CARE,
        when=conditions.ranks_checkpoints_by_validation,
    ),
    Limit(
        "grpo.use_leave_one_out_baseline",
        NOT_NULL,
        "NeMo-RL's default is true, and its dynamic sampling then drops the only correct answer of a "
        "group; set it to false, as in every paper here",
        Scope.CARE,
    ),
    Limit(
        "policy.megatron_cfg.peft.target_modules",
        NOT_EMPTY,
        "it adapts every parallel linear, the output layer too; use [linear_qkv, linear_proj, "
        "linear_fc1, linear_fc2]",
        Scope.CARE,
        when=conditions.trains_lora,
    ),
    Limit(
        "policy.megatron_cfg.peft.lora_dtype",
        one_of(None, "float32", "bfloat16", "float16"),
        "a string that names no precision (NeMo-RL's base has the string None); use null",
        Scope.CARE,
        when=conditions.trains_lora,
    ),
    Limit(
        "policy.megatron_cfg.env_vars.NVTE_FP8_BLOCK_SCALING_FP32_SCALES",
        one_of("1"),
        'blockwise FP8 trains with FP32 scales, as the rollouts use; set it to "1"',
        Scope.CARE,
        when=conditions.trains_in_blockwise_fp8,
    ),
    Limit(
        "policy.megatron_cfg.fp8_cfg.fp8_param",
        OFF,
        "parameters kept in FP8 gave NaN logprobs with blockwise scaling in NeMo-RL; set it to false",
        Scope.CARE,
        when=conditions.trains_in_fp8,
    ),
    Limit(
        "loss_fn.use_importance_sampling_correction",
        ON,
        "FP8 rounds differently in rollouts and in training, which the correction compensates; set it "
        "to true, or start from base/cluster-fp8.yaml",
        Scope.CARE,
        when=conditions.trains_or_samples_in_fp8,
    ),
)
