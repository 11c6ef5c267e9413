"""The recipe's section ``policy``: model, batches, backends, sampling; see `sections`."""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, NonNegativeInt

from nemo_grpo.recipe.layout import Layout
from nemo_grpo.recipe.megatron_sections import Megatron, Section, Switch


class Tokenizer(Section):
    """The tokenizer."""

    name: str | None = None
    """Folder or Hub name; null: that of nemo_grpo.new_model; not given: policy.model_name."""
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
    """NeMo-RL's DTensor backend: PyTorch's FSDP and tensor parallelism."""

    enabled: bool = False
    """Train with it instead of Megatron-core."""
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


class RolloutGPUs(Section):
    """GPUs of separate rollouts."""

    gpus_per_node: int | None = Field(default=None, gt=0)
    """GPUs of each of their nodes; null: none."""
    num_nodes: int | None = Field(default=None, gt=0)
    """Nodes; null: part of the only node."""


class Colocated(Section):
    """Rollouts on the GPUs that train, or on others."""

    enabled: bool = True
    """Share them; false: rollouts have GPUs of their own."""
    resources: RolloutGPUs = Field(default_factory=RolloutGPUs)
    """Their own GPUs, if they are separate."""


class VLLM(Section):
    """NeMo-RL's vLLM engines; the defaults are NeMo-RL's."""

    PLACES: ClassVar[tuple[str, ...]] = (
        "enable_expert_parallel",
        "enforce_eager",
        "env_vars",
        "expert_parallel_size",
        "gpu_memory_utilization",
        "pipeline_parallel_size",
        "tensor_parallel_size",
    )

    tensor_parallel_size: int = Field(default=1, gt=0)
    """TP of an engine."""
    pipeline_parallel_size: int = Field(default=1, gt=0)
    """PP of an engine."""
    expert_parallel_size: int = Field(default=1, gt=0)
    """EP of an engine."""
    gpu_memory_utilization: float = Field(default=0.6, gt=0, lt=1)
    """Share of a GPU's memory that vLLM takes."""
    max_model_len: int = Field(gt=0)
    """Longest sequence of an engine, tokens; not given: policy.max_total_sequence_length."""
    precision: Literal["auto", "bfloat16", "float16", "float32", "fp8"] = "bfloat16"
    """Precision of the weights."""
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = "auto"
    """Precision of the KV cache; auto: that of the weights."""
    is_mx: bool = False
    """FP8 with a scale per 32 numbers."""
    quantization_ignored_layer_kws: list[str] = Field(default_factory=list)
    """Parts of the names of layers that stay out of FP8."""
    enable_prefix_caching: bool | None = None
    """Reuse the KV cache of prompts with a common prefix; null: on GPUs from Ampere on."""
    async_engine: bool = False
    """Answer each request as soon as it is finished."""
    reset_encoder_cache_after_weight_update: bool = False
    """Clear an asynchronous engine's cache of encoded images after each refit."""
    enforce_eager: bool = False
    """Decode without CUDA graphs."""
    skip_tokenizer_init: bool | None = None
    """Start vLLM without a tokenizer; null: unless there are stop_strings."""


class Speculation(Section):
    """vLLM's speculative decoding."""

    method: str | None = None
    """Drafting method: mtp, eagle3, ngram, ..; null: as the draft model says."""
    num_speculative_tokens: int | None = Field(default=None, ge=0)
    """Tokens drafted before each pass; 0: none; null: as many as the draft model says, `plan` counts none."""


class VLLMArguments(Section):
    """Arguments that go to vLLM as they are."""

    max_num_seqs: int | None = Field(default=None, gt=0)
    """Sequences that an engine decodes at once; null: vLLM's own number."""
    speculative_config: Speculation | None = None
    """Speculative decoding; null: none."""


class Generation(Section):
    """Sampling of the responses."""

    PLACES: ClassVar[tuple[str, ...]] = ("colocated",)
    EXTENDS: ClassVar[tuple[str, ...]] = ("val_temperature", "val_top_p", "val_top_k")

    backend: Literal["vllm", "sglang", "megatron", "trtllm", "dynamo"] = "vllm"
    """NeMo-RL's generation engine; the embedded engine's is nemo_grpo.engine.generator."""
    max_new_tokens: int = Field(gt=0)
    """Longest response, tokens."""
    temperature: float = Field(default=1.0, ge=0.01)
    """Sampling temperature of the rollouts; logprobs use the same one, and vLLM samples at 0.01 or more."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus of the rollouts; 1: all tokens."""
    top_k: int | None = Field(default=None, gt=0)
    """Number of most likely tokens to sample from; null: all."""
    val_temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature of validation; 0: greedy; not given: temperature."""
    val_top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus of validation; not given: top_p."""
    val_top_k: int | None = Field(default=None, gt=0)
    """Number of most likely tokens of validation; null: all; not given: top_k."""
    stop_strings: list[str] | None = None
    """Texts that end a response; null: none."""
    stop_token_ids: list[NonNegativeInt] | None = None
    """Token ids that end a response, in addition to the model's end of sequence; null: none."""
    colocated: Colocated = Field(default_factory=Colocated)
    """GPUs of the rollouts."""
    vllm_cfg: VLLM
    """vLLM's engines."""
    vllm_kwargs: VLLMArguments = Field(default_factory=VLLMArguments)
    """vLLM's other arguments."""


class Policy(Section):
    """The model, its batches and its engines."""

    PLACES: ClassVar[tuple[str, ...]] = (
        "dynamic_batching",
        "generation_batch_size",
        "logprob_batch_size",
        "make_sequence_length_divisible_by",
        "sequence_packing",
        "train_micro_batch_size",
    )

    model_name: str | None
    """Hugging Face folder or Hub name; null: a model of nemo_grpo.new_model's sizes."""
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
    has instructions for it, else float32. A resumed run keeps its precision."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Default of megatron_cfg.optimizer.clip_grad, which is the one in effect; 0: no clipping."""
    is_vlm: bool = False
    """NeMo-Gym's data has images, so that NeMo-RL takes the model's processor."""
    hf_config_overrides: dict[str, Any] = Field(default_factory=dict)
    """Replacements of fields of the model's config.json."""
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
        """True if microbatches are filled by tokens. train_micro_batch_size then divides nothing."""
        return self.sequence_packing.enabled or self.dynamic_batching.enabled

    @property
    def train_mb_tokens(self) -> int | None:
        """Maximum tokens of a training microbatch, or None if sequences are not packed."""
        if not self.sequence_packing.enabled:
            return None
        longest = self.max_total_sequence_length * self.train_micro_batch_size
        return self.sequence_packing.train_mb_tokens or longest

    @property
    def logprob_mb_tokens(self) -> int | None:
        """Maximum tokens of a scoring microbatch, or None if sequences are not packed."""
        if not self.sequence_packing.enabled:
            return None
        longest = self.max_total_sequence_length * self.logprob_batch_size
        return self.sequence_packing.logprob_mb_tokens or longest


def stop_refusals(ids: Sequence[int], vocab_size: int, model: str) -> Iterator[str]:
    """Yield reasons why a model cannot sample these ``policy.generation.stop_token_ids``."""
    outside = [token_id for token_id in ids if token_id >= vocab_size]
    if outside:
        yield (
            f"policy.generation.stop_token_ids={list(ids)}: {', '.join(map(str, outside))} is not below "
            f"vocab_size={vocab_size} of {model}, and vLLM refuses the prompts, after which NeMo-RL trains "
            "on empty responses; take ids of this model's tokenizer, or leave them out"
        )
