"""The recipe's section ``policy.megatron_cfg``: layout, precision, optimizer, adapters; see `sections`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A part of a recipe that NeMo-RL defines: wrong types are errors, further keys pass."""

    model_config = ConfigDict(
        extra="allow", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class MegatronOptimizer(Section):
    """Megatron-core's optimizer."""

    optimizer: Literal["adam", "sgd"] = "adam"
    """adam is AdamW."""
    lr: float = Field(gt=0)
    """Peak learning rate."""
    min_lr: float = Field(default=0.0, ge=0)
    """Learning rate at the end of the decay."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the second moment."""
    adam_eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    sgd_momentum: float = Field(default=0.9, ge=0, lt=1)
    """Momentum of sgd."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Largest gradient norm; 0: no clipping."""
    use_distributed_optimizer: bool = True
    """Shard the optimizer state over the data-parallel ranks."""
    use_precision_aware_optimizer: bool = False
    """Optimizer state in reduced precision (GPU only)."""


class MegatronScheduler(Section):
    """Learning rate and weight decay over the steps."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = "constant"
    """Shape of the decay."""
    lr_decay_iters: int | None = Field(default=None, gt=0)
    """Updates until min_lr; null: as many as the run makes."""
    lr_warmup_iters: int = Field(default=0, ge=0)
    """Updates of linear warm-up."""
    lr_warmup_init: float = Field(default=0.0, ge=0)
    """Learning rate at the start of the warm-up."""
    start_weight_decay: float = Field(default=0.01, ge=0)
    """Weight decay at the start; not given: optimizer.weight_decay."""
    end_weight_decay: float = Field(default=0.01, ge=0)
    """Weight decay at the end; not given: optimizer.weight_decay."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """Way from start to end weight decay."""


class FP8(Section):
    """FP8 training through Transformer Engine (GPU only)."""

    enabled: bool = False
    """Use FP8 for the linear layers."""
    fp8: Literal["e4m3", "hybrid"] = "e4m3"
    """Format: e4m3, or e4m3 forward and e5m2 backward."""
    fp8_recipe: Literal["blockwise", "tensorwise", "delayed", "mxfp8", "custom"] = "blockwise"
    """Scaling recipe."""
    fp8_param: bool = False
    """Keep the parameters in FP8."""


class ModelOverrides(Section):
    """Fields of megatron-core's TransformerConfig; the embedded engine takes those that are declared here."""

    first_last_layers_bf16: bool = False
    """Under FP8, the first and last layers stay in BF16 (Transformer Engine's advice)."""
    num_layers_at_start_in_bf16: int = Field(default=1, ge=0)
    """How many of the first."""
    num_layers_at_end_in_bf16: int = Field(default=1, ge=0)
    """How many of the last."""


class Peft(Section):
    """LoRA."""

    enabled: bool = False
    """Train low-rank adapters only."""
    target_modules: list[str] = []
    """Megatron's names of the linear layers to adapt; empty: all (NeMo-RL: also the output layer)."""
    exclude_modules: list[str] = []
    """Names to leave out."""
    dim: int = Field(default=8, gt=0)
    """Rank."""
    alpha: int = Field(default=32, gt=0)
    """Scale; the update is multiplied by alpha / dim."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout in front of the adapter; the embedded engine has none."""
    lora_A_init_method: str = "xavier"
    """How A begins; the embedded engine: xavier, a normal distribution."""
    lora_B_init_method: str = "zero"
    """How B begins; zero: training starts at the base model."""
    lora_dtype: str | None = None
    """Precision of the adapters; null: policy.precision."""


class MegatronCheckpoint(Section):
    """How Megatron-core writes checkpoints."""

    async_save: bool = False
    """Train on while a checkpoint is written; costs a copy of its tensors in host memory meanwhile."""


class Megatron(Section):
    """Megatron-core: layout, precision, optimizer."""

    enabled: bool = True
    """Train with Megatron-core."""
    tensor_model_parallel_size: int = Field(default=1, gt=0)
    """TP."""
    pipeline_model_parallel_size: int = Field(default=1, gt=0)
    """PP."""
    context_parallel_size: int = Field(default=1, gt=0)
    """CP."""
    expert_model_parallel_size: int = Field(default=1, gt=0)
    """EP."""
    sequence_parallel: bool = False
    """Shard activations between the TP regions along the sequence."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """With activation_checkpointing: whole layers, or only recompute_modules; null: full."""
    recompute_modules: list[str] | None = None
    """Parts of a layer that selective recomputes; null: core_attn."""
    optimizer: MegatronOptimizer
    """Optimizer."""
    scheduler: MegatronScheduler = Field(default_factory=MegatronScheduler)
    """Schedules."""
    fp8_cfg: FP8 | None = None
    """FP8; null: off."""
    model_overrides: ModelOverrides | None = None
    """Further fields of megatron-core's TransformerConfig; null: none."""
    peft: Peft | None = None
    """LoRA; null: off."""
    checkpoint: MegatronCheckpoint = Field(default_factory=MegatronCheckpoint)
    """Checkpoints."""
