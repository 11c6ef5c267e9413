"""The recipe's section ``policy``: the model, its batches and its backends; see `sections`."""

from typing import Any, Literal

from pydantic import Field

from nemo_grpo.recipe.generation_sections import Generation
from nemo_grpo.recipe.layout import Layout
from nemo_grpo.recipe.megatron_sections import Megatron, Section, Switch


class Tokenizer(Section):
    """The tokenizer."""

    name: str | None = None
    """Folder or Hub name; null: that of nemo_grpo.warm_start; not given: policy.model_name."""
    chat_template: str | None = "default"
    """Jinja text or file; default: the tokenizer's; null: NeMo-RL's plain concatenation."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments of the template; null: none."""


class SequencePacking(Section):
    """Several sequences in one row of a microbatch."""

    enabled: bool = False
    """Pack microbatches by tokens instead of sequences, without padding."""
    train_mb_tokens: int | None = Field(default=None, gt=0)
    """Maximum tokens of a training microbatch; null: max_total_sequence_length x train_micro_batch_size."""
    logprob_mb_tokens: int | None = Field(default=None, gt=0)
    """Maximum tokens of a scoring microbatch; null: max_total_sequence_length x logprob_batch_size."""


class DTensor(Section):
    """NeMo-RL's other training backend: PyTorch's FSDP and tensor parallelism."""

    enabled: bool = False
    """Train with it, and not with Megatron-core."""
    tensor_parallel_size: int = Field(default=1, gt=0)
    """TP."""
    context_parallel_size: int = Field(default=1, gt=0)
    """CP."""
    expert_parallel_size: int = Field(default=1, gt=0)
    """EP."""
    sequence_parallel: bool = False
    """Shard activations between the TP regions along the sequence."""

    @property
    def layout(self) -> Layout:
        """Layout of a replica of the model over the ranks."""
        return Layout(
            tensor=self.tensor_parallel_size,
            context=self.context_parallel_size,
            expert=self.expert_parallel_size,
            sequence_parallel=self.sequence_parallel,
        )


class Policy(Section):
    """The model, its batches and its engines."""

    model_name: str | None
    """Hugging Face folder or Hub name; null: the model of nemo_grpo.warm_start."""
    tokenizer: Tokenizer = Field(default_factory=Tokenizer)
    """Tokenizer."""
    train_global_batch_size: int = Field(gt=0)
    """Sequences per optimizer update."""
    train_micro_batch_size: int = Field(gt=0)
    """Sequences per forward and backward pass and data-parallel rank."""
    logprob_batch_size: int = Field(gt=0)
    """Sequences per scoring pass and rank; not given: train_micro_batch_size."""
    logprob_chunk_size: int | None = Field(default=None, gt=0)
    """Tokens whose logits NeMo-RL holds in FP32 at once; null: all of a microbatch."""
    generation_batch_size: int = Field(gt=0)
    """Responses sampled at once by the embedded engine; not given: train_global_batch_size."""
    max_total_sequence_length: int = Field(gt=0)
    """Longest sequence, prompt and response, in tokens."""
    make_sequence_length_divisible_by: int = Field(default=1, gt=0)
    """NeMo-RL pads sequences to a multiple of this; not given: TP."""
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "bfloat16"
    """Precision of the parameters; auto, for the embedded engine: bfloat16 on a GPU and where the processor
    has instructions for it, else float32. A resumed run keeps what it began with."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Default of megatron_cfg.optimizer.clip_grad, which is the one in effect; 0: no clipping."""
    is_vlm: bool = False
    """NeMo-Gym's data has images, so that NeMo-RL takes the model's processor."""
    hf_config_overrides: dict[str, Any] = Field(default_factory=dict)
    """Fields of the model's config.json with other values."""
    sequence_packing: SequencePacking = Field(default_factory=SequencePacking)
    """Packing."""
    dynamic_batching: Switch = Field(default_factory=Switch)
    """NeMo-RL's microbatches of sequences of similar length."""
    megatron_cfg: Megatron
    """Megatron-core."""
    dtensor_cfg: DTensor = Field(default_factory=DTensor)
    """PyTorch's parallelism in place of Megatron-core; only on the cluster."""
    router_replay: Switch = Field(default_factory=Switch)
    """Train with the experts that the rollout chose."""
    generation: Generation
    """Sampling."""

    @property
    def layout(self) -> Layout:
        """Layout of a replica of the model over the ranks that train."""
        return (self.dtensor_cfg if self.dtensor_cfg.enabled else self.megatron_cfg).layout

    @property
    def batches_by_tokens(self) -> bool:
        """True if tokens fill a microbatch, on both engines; train_micro_batch_size then divides nothing."""
        return self.sequence_packing.enabled or self.dynamic_batching.enabled

    @property
    def train_mb_tokens(self) -> int | None:
        """Maximum tokens of a training microbatch; None: sequences are not packed."""
        given = self.sequence_packing.train_mb_tokens
        longest = self.max_total_sequence_length * self.train_micro_batch_size
        return (given or longest) if self.sequence_packing.enabled else None

    @property
    def logprob_mb_tokens(self) -> int | None:
        """Maximum tokens of a scoring microbatch; None: sequences are not packed."""
        given = self.sequence_packing.logprob_mb_tokens
        longest = self.max_total_sequence_length * self.logprob_batch_size
        return (given or longest) if self.sequence_packing.enabled else None
