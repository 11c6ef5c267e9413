"""The recipe's section ``policy.megatron_cfg``: layout, precision, optimizer, adapters; see `sections`.

A rule about one section is a method of its class under `section_rule`. Its messages begin with the key in the
section, whose name is put in front.
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, model_serializer, model_validator

from nemo_grpo.recipe.layout import Layout
from nemo_grpo.support.errors import did_you_mean

WITHOUT_RULES = {"rules": False}
"""Validation context that checks types only."""


def section_rule(check: Callable[[Any], Iterator[str]]) -> Any:
    """A method that yields messages as a validator of its class."""

    def ask(self: Any, info: ValidationInfo) -> Any:
        if info.context != WITHOUT_RULES and (messages := list(check(self))):
            raise ValueError("; ".join(messages))
        return self

    return model_validator(mode="after")(ask)


class Section(BaseModel):
    """A part of a recipe that NeMo-RL defines: wrong types are errors, other keys pass."""

    model_config = ConfigDict(
        extra="allow", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @model_serializer(mode="wrap")
    def _without_nulls_that_nobody_wrote(self, dump: Any) -> dict[str, Any]:
        """Leave out nulls that nobody wrote: one would replace NeMo-RL's own default."""
        given = self.model_fields_set
        return {name: value for name, value in dump(self).items() if value is not None or name in given}


class Switch(Section):
    """A feature of NeMo-RL of which only this is read."""

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
    sgd_momentum: float = Field(default=0.9, ge=0, lt=1)
    """Momentum of sgd; 0: none."""
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

    @section_rule
    def _min_lr_is_at_most_lr(self) -> Iterator[str]:
        if self.min_lr > self.lr:
            yield f"min_lr={self.min_lr} is above lr={self.lr}; lower it"


class MegatronScheduler(Section):
    """Learning rate and weight decay over the steps."""

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

    @section_rule
    def _warmup_ends_before_decay(self) -> Iterator[str]:
        if self.lr_decay_iters is not None and self.lr_warmup_iters >= self.lr_decay_iters:
            yield (
                f"lr_warmup_iters={self.lr_warmup_iters} must be less than lr_decay_iters="
                f"{self.lr_decay_iters}, which counts from the first update; change one of them"
            )


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
"""Megatron's names of a decoder layer's linear layers, all that the embedded engine and the planner know."""
FURTHER_LAYERS = (
    *("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj"),
    *("in_proj", "out_proj", "eh_proj", "output_layer"),
)
"""Those of latent attention, of Mamba and Gated DeltaNet, of multi-token prediction, and of the model."""
OF_HUGGING_FACE = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn"),
    "linear_proj": ("o_proj", "dense"),
    "linear_fc1": ("gate_proj", "up_proj", "gate_up_proj", "w1", "w3"),
    "linear_fc2": ("down_proj", "w2"),
    "linear_q_down_proj": ("q_a_proj",),
    "linear_q_up_proj": ("q_b_proj",),
    "linear_kv_down_proj": ("kv_a_proj_with_mqa",),
    "linear_kv_up_proj": ("kv_b_proj",),
    "output_layer": ("lm_head",),
}
"""Megatron's layer -> Hugging Face's, of which it may hold several."""


def _megatrons(name: str) -> tuple[str, ...]:
    """The layers that a name means, itself if it is Megatron's or a pattern; none if it is unknown."""
    if name == "all-linear":  # PEFT's word
        return LORA_LAYERS
    if own := [own for own, theirs in OF_HUGGING_FACE.items() if name.rpartition(".")[2] in theirs]:
        return tuple(own)
    return (name,) if "*" in name or name in (*LORA_LAYERS, *FURTHER_LAYERS) else ()


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
        """Those of `LORA_LAYERS` that are adapted."""
        chosen = self.target_modules or LORA_LAYERS
        return tuple(name for name in LORA_LAYERS if name in chosen and name not in self.exclude_modules)

    @section_rule
    def _layers_have_megatrons_names(self) -> Iterator[str]:
        """NeMo-RL takes any name; where none is a layer's, its driver ends without an optimizer."""
        lists = {"target_modules": self.target_modules, "exclude_modules": self.exclude_modules}
        for key, names in lists.items() if self.enabled else ():
            meant = {name: _megatrons(name) for name in names}
            if all(own == (name,) for name, own in meant.items()):
                continue
            if unknown := [name for name, own in meant.items() if not own]:
                hint = did_you_mean(unknown[0], LORA_LAYERS)
                yield f"{key}: {unknown[0]!r} is no linear layer of Megatron-core{hint}"
                continue
            own = dict.fromkeys(layer for layers in meant.values() for layer in layers)
            yield (
                f"{key}=[{', '.join(names)}] has Hugging Face's names, and Megatron-core's linear_qkv and "
                f"linear_fc1 hold several of those layers; use [{', '.join(own)}]"
            )


class MegatronCheckpoint(Section):
    """Writing of Megatron-core's checkpoints."""

    async_save: bool = False
    """Train on while a checkpoint is written; its tensors are held as a copy in host memory meanwhile."""


class DistributedDataParallel(Section):
    """Exchange of gradients and parameters between data-parallel ranks; the defaults are NeMo-RL's."""

    grad_reduce_in_fp32: bool = False
    """Sum gradients in FP32."""
    overlap_param_gather: bool = True
    """Gather updated parameters during the next forward pass."""


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
    defer_fp32_logits: bool = False
    """Keep logits in the model's precision until the loss."""
    use_fused_linear_logprobs: bool = False
    """Logprobs from hidden states in chunks, without whole logits."""
    mtp_num_layers: int = Field(default=0, ge=0)
    """Layers of multi-token prediction; 0: none."""
    mtp_loss_scaling_factor: float = Field(default=0.0, ge=0)
    """Weight of the loss of multi-token prediction; 0: none."""
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = "alltoall"
    """Dispatcher of tokens to their experts' ranks."""
    force_reconvert_from_hf: bool = False
    """Convert the Hugging Face model anew, even if it has been converted."""

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

    @section_rule
    def _sequence_parallel_needs_tensor_parallel(self) -> Iterator[str]:
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            yield (
                "sequence_parallel=true shards over the TP ranks, but tensor_model_parallel_size=1; set it "
                "to false or raise TP"
            )

    @section_rule
    def _delayed_scaling_covers_all_layers(self) -> Iterator[str]:
        leaves_out = self.model_overrides is not None and self.model_overrides.first_last_layers_bf16
        if self.fp8_in_use and self.fp8_in_use.fp8_recipe == "delayed" and leaves_out:
            yield (
                "model_overrides.first_last_layers_bf16=true: delayed scaling keeps one state for all "
                "layers; set it to false, or fp8_cfg.fp8_recipe to tensorwise or blockwise"
            )
