"""The recipe's section ``policy.generation``: the sampler and its GPUs; see `sections`."""

from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import Field, NonNegativeInt

from nemo_grpo.recipe.megatron_sections import Section


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
    """Parts of the names of layers that FP8 leaves alone."""
    enable_prefix_caching: bool | None = None
    """Keep what is computed of a prompt for the next one that begins alike; null: on GPUs from Ampere on."""
    async_engine: bool = False
    """Answer each request as soon as it is finished."""
    reset_encoder_cache_after_weight_update: bool = False
    """An asynchronous engine forgets what its vision tower made of images after each refit."""
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


def stop_refusals(ids: Sequence[int], vocab_size: int, model: str) -> Iterator[str]:
    """Why a model does not sample these ``policy.generation.stop_token_ids``."""
    if outside := [number for number in ids if number >= vocab_size]:
        yield (
            f"policy.generation.stop_token_ids={list(ids)}: {', '.join(map(str, outside))} is not below "
            f"vocab_size={vocab_size} of {model}, and vLLM refuses the prompts, after which NeMo-RL trains "
            "on empty responses; take ids of this model's tokenizer, or leave them out"
        )
