"""The recipe's section ``policy.megatron_cfg``: layout, precision, optimizer, adapters; see `sections`."""

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_serializer

from nemo_grpo.recipe.layout import Layout


class Section(BaseModel):
    """A section of a recipe that NeMo-RL defines. Values of a wrong type are errors, further keys are not.

    Attributes: PLACES, EXTENDS: keys of the section that a continued run may change, see `recipe.continuity`.
    """

    PLACES: ClassVar[tuple[str, ...]] = ()
    EXTENDS: ClassVar[tuple[str, ...]] = ()

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)

    @model_serializer(mode="wrap")
    def _without_default_nulls(self, dump: Any) -> dict[str, Any]:
        """Leave out a null that the recipe does not set: it would replace NeMo-RL's own default."""
        set_fields = self.model_fields_set
        return {name: value for name, value in dump(self).items() if value is not None or name in set_fields}


class Switch(Section):
    """A feature of NeMo-RL; only its switch is read here."""

    enabled: bool = False
    """Use it."""


class MegatronOptimizer(Section):
    """Megatron-core's optimizer."""

    optimizer: Literal["adam", "sgd", "muon", "dist_muon", "adaptive_muon", "soap", "lion"] = "adam"
    """adam is AdamW; beyond adam and sgd the cluster needs the package emerging-optimizers."""
    lr: float = Field(gt=0)
    """Peak learning rate."""
    min_lr: float = Field(default=0.0, ge=0)
    """Learning rate at the end of the decay; 0: none."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay; 0: none."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment; 0: the gradient itself."""
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the second moment; 0: the square of the gradient itself."""
    adam_eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Largest gradient norm; 0: no clipping."""
    use_distributed_optimizer: bool = True
    """Shard the optimizer state over the data-parallel ranks."""
    use_precision_aware_optimizer: bool = False
    """Optimizer state in reduced precision (GPU only)."""
    optimizer_cpu_offload: bool = False
    """Keep optimizer state in host memory."""
    optimizer_offload_fraction: float = Field(default=0.0, ge=0, le=1)
    """Share of the state that optimizer_cpu_offload moves; 0: none."""


class MegatronScheduler(Section):
    """Learning rate and weight decay over the steps."""

    EXTENDS: ClassVar[tuple[str, ...]] = ("lr_decay_iters",)

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = "constant"
    """Shape of the decay."""
    lr_decay_iters: int | None = Field(default=None, gt=0)
    """Updates until min_lr; null: all updates of the run."""
    lr_warmup_iters: int = Field(default=0, ge=0)
    """Updates of linear warm-up; 0: none."""
    lr_warmup_init: float = Field(default=0.0, ge=0)
    """Learning rate at the start of the warm-up; 0: none."""
    start_weight_decay: float = Field(default=0.01, ge=0)
    """Weight decay at the start; 0: none; not given: optimizer.weight_decay."""
    end_weight_decay: float = Field(default=0.01, ge=0)
    """Weight decay at the end; 0: none; not given: optimizer.weight_decay."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the change from start to end weight decay."""


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
    """Fields of megatron-core's TransformerConfig; the embedded engine supports those declared here."""

    first_last_layers_bf16: bool = False
    """Under FP8, the first and last layers stay in BF16 (Transformer Engine's advice)."""
    num_layers_at_start_in_bf16: int = Field(default=1, ge=0)
    """Number of first layers; 0: none."""
    num_layers_at_end_in_bf16: int = Field(default=1, ge=0)
    """Number of last layers; 0: none."""


LORA_LAYERS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Megatron's names of a decoder layer's linear layers that the embedded engine and the planner support."""


class Peft(Section):
    """LoRA."""

    enabled: bool = False
    """Train low-rank adapters only."""
    target_modules: list[str] = []
    """Megatron's names of the linear layers to adapt; empty: all (NeMo-RL: also the output layer)."""
    exclude_modules: list[str] = []
    """Names to exclude."""
    dim: int = Field(default=8, gt=0)
    """Rank."""
    alpha: int = Field(default=32, gt=0)
    """Scale; the update is multiplied by alpha / dim."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout before the adapter; 0: none; not supported by the embedded engine."""
    lora_A_init_method: Literal["xavier", "normal", "kaiming", "uniform", "zero"] = "xavier"
    """Initialisation of A; the embedded engine: xavier, a normal distribution."""
    lora_B_init_method: Literal["xavier", "normal", "kaiming", "uniform", "zero"] = "zero"
    """Initialisation of B; zero: training starts at the base model."""
    lora_dtype: Literal["float32", "bfloat16", "float16", "None"] | None = None
    """Precision of the adapters; null: policy.precision; None is a text in NeMo-RL's base."""

    @property
    def layers(self) -> tuple[str, ...]:
        """Members of `LORA_LAYERS` that are adapted."""
        targets = self.target_modules or LORA_LAYERS
        return tuple(name for name in LORA_LAYERS if name in targets and name not in self.exclude_modules)


class MegatronCheckpoint(Section):
    """Writing of Megatron-core's checkpoints."""

    async_save: bool = False
    """Continue training while a checkpoint is written, from a copy of its tensors in host memory."""


class DistributedDataParallel(Section):
    """Exchange of gradients and parameters between data-parallel ranks; the defaults are NeMo-RL's."""

    grad_reduce_in_fp32: bool = False
    """Sum gradients in FP32."""
    overlap_param_gather: bool = True
    """Gather updated parameters during the next forward pass."""


class Megatron(Section):
    """Megatron-core: layout, precision, optimizer."""

    PLACES: ClassVar[tuple[str, ...]] = (
        "activation_checkpointing",
        "checkpoint",
        "context_parallel_size",
        "empty_unused_memory_level",
        "env_vars",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "pipeline_model_parallel_size",
        "recompute_granularity",
        "recompute_modules",
        "sequence_parallel",
        "tensor_model_parallel_size",
    )

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
    expert_tensor_parallel_size: int = Field(default=1, gt=0)
    """TP of the experts."""
    num_layers_in_first_pipeline_stage: int | None = Field(default=None, gt=0)
    """Layers of an uneven pipeline's first stage; null: as many as the others."""
    num_layers_in_last_pipeline_stage: int | None = Field(default=None, gt=0)
    """Layers of an uneven pipeline's last stage; null: as many as the others."""
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
    """Other fields of megatron-core's TransformerConfig; null: none."""
    peft: Peft | None = None
    """LoRA; null: off."""
    checkpoint: MegatronCheckpoint = Field(default_factory=MegatronCheckpoint)
    """Checkpoints."""
    distributed_data_parallel_config: DistributedDataParallel = Field(default_factory=DistributedDataParallel)
    """Data parallelism."""
    env_vars: dict[str, str] | None = None
    """Environment of the workers; null: as it is."""
    use_fused_linear_logprobs: bool = False
    """Logprobs from hidden states in chunks, without whole logits."""
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = "alltoall"
    """Dispatcher of tokens to their experts' ranks."""

    @property
    def layout(self) -> Layout:
        """Layout of a replica of the model over the ranks."""
        return Layout(
            tensor=self.tensor_model_parallel_size,
            pipeline=self.pipeline_model_parallel_size,
            context=self.context_parallel_size,
            expert=self.expert_model_parallel_size,
            expert_tensor=self.expert_tensor_parallel_size,
            sequence_parallel=self.sequence_parallel,
            first_stage_layers=self.num_layers_in_first_pipeline_stage,
            last_stage_layers=self.num_layers_in_last_pipeline_stage,
        )

    @property
    def fp8_in_use(self) -> FP8 | None:
        """FP8, if linear layers train in it."""
        return self.fp8_cfg if self.fp8_cfg is not None and self.fp8_cfg.enabled else None

    @property
    def lora_in_use(self) -> Peft | None:
        """LoRA, if adapters are trained."""
        return self.peft if self.peft is not None and self.peft.enabled else None
