"""Memory per GPU, in bytes. Every formula counts tensors; one stated allowance covers the rest.

Conventions: h hidden size, q and kv widths of all query and all key heads, f feed-forward width, V
vocabulary, L layers, t TP, p PP, c CP, BF16 = 2 bytes. Ranks of a pipeline differ, so everything is per stage
and the heaviest stage counts.
"""

from nemo_grpo.models import ModelSpec
from nemo_grpo.plan.inputs import PlanInput
from nemo_grpo.plan.parameters import (
    Counts,
    adapter_counts,
    attention_sizes,
    dense_layers,
    model_parameters,
    stage_counts,
)

GIB = 1024**3
USABLE = 0.92
"""Share of a GPU's memory that a plan may fill; the rest is for the allocator's fragments."""

ALLOWANCE = 6 * GIB
"""Bytes not computed: two CUDA contexts, NCCL buffers, GEMM workspaces, a sleeping vLLM's remainder."""

VLLM_WORKSPACE = 4 * GIB
"""Bytes not computed: activations of vLLM's largest prefill batch, and its CUDA graphs."""

PROCESS = (384 + 30) * 1024**2
"""Bytes of the embedded engine's interpreter once a policy is built, and of the heap that rollouts and
validations leave; measured on a CPU (the quickstart)."""

HEAP = 0.6
"""Share of the embedded engine's activations that comes on top: tensors of the backward pass and freed heap;
measured on a CPU (benchmarks/plan_vs_measured.py)."""

LOGIT_BYTES = 14
"""Bytes per logit in training: BF16 logits 2, FP32 copy 4, log-softmax 4, softmax for the backward pass 4."""

SCORE_LOGIT_BYTES = 10
"""Bytes per logit in scoring: BF16 2, FP32 4, log-softmax 4."""

CHUNKED_LOGIT_BYTES = 6
"""Bytes per logit with policy.logprob_chunk_size: BF16 logits 2, FP32 gradient 4; the rest per chunk only."""


def trained_counts(shape: ModelSpec, setup: PlanInput, stage: int) -> Counts:
    """Count the parameters of a stage that have gradients: all, or the adapters."""
    if setup.lora_dim:
        return adapter_counts(shape, setup.layout, stage, setup.lora_dim, setup.lora_modules)
    return stage_counts(shape, setup.layout, stage)


def weight_bytes(shape: ModelSpec, setup: PlanInput, stage: int) -> int:
    """Count BF16 parameters, adapters too; FP8 training also caches two FP8 copies of each matrix.

    2 n [+ 2 (linear + expert) under FP8: row-wise and column-wise, as Transformer Engine keeps them].
    """
    counts = stage_counts(shape, setup.layout, stage)
    adapters = trained_counts(shape, setup, stage).total if setup.lora_dim else 0
    cached = 2 * (counts.linear + counts.expert) if setup.fp8_training else 0
    return 2 * (counts.total + adapters) + cached


def gradient_bytes(shape: ModelSpec, setup: PlanInput, stage: int) -> int:
    """Count the gradient buffer of megatron-core's DDP, unsharded: BF16, or FP32 if it reduces in FP32."""
    return setup.grad_bytes * trained_counts(shape, setup, stage).total


def optimizer_bytes_per_parameter(setup: PlanInput) -> int:
    """Count the optimizer state of one parameter, before sharding.

    Adam: FP32 parameter 4 and two moments 8; BF16 gradients are copied to FP32 for the update, 4. The
    precision-aware optimizer keeps the 16 bits that a BF16 parameter lacks instead of an FP32 copy, and reads
    the gradient as it is: 2 + 8. (megatron/core/optimizer: distrib_optimizer.py, store_param_remainders.)
    """
    moments = 8 if setup.optimizer == "adam" else 4
    if setup.precision_aware:
        return 2 + moments
    copy = 4 if setup.grad_bytes == 2 or not setup.distributed_optimizer else 0
    return 4 + moments + copy


def optimizer_bytes(shape: ModelSpec, setup: PlanInput, stage: int) -> int:
    """Count one rank's optimizer state, sharded over DP x CP; an expert's over the ranks that hold it."""
    counts, each = trained_counts(shape, setup, stage), optimizer_bytes_per_parameter(setup)
    shards, expert_shards = (setup.shards, setup.expert_shards) if setup.distributed_optimizer else (1, 1)
    state = each * counts.dense // shards + each * counts.expert // expert_shards
    return int(state * (1 - setup.offload_fraction))


def layer_bytes_per_token(
    shape: ModelSpec, setup: PlanInput, recompute: tuple[str, ...] = (), *, is_dense: bool = False
) -> float:
    """Count what one layer keeps of one token for its backward pass, with flash attention and no dropout.

    Inputs and outputs of both norms 8 h / s; q, k, v and the attention's output 2 (2 q + 2 kv) / t; its
    log-sum-exp 4 heads / t; [inputs of the norms on q and k 2 (q + kv) / t]; gate and up 4 f / t, their
    product 2 f / t. s is t with sequence parallelism, else 1. Follows Korthikanti et al. (2205.05198) with a
    gated feed-forward layer, grouped queries and no stored attention matrix. Linear attention is assumed to
    keep as much as attention. Experts: see `_expert_bytes_per_token`.

    Args: recompute: megatron-core's names of modules whose inner tensors are not kept.
          is_dense: one of the dense layers of a model with experts.
    """
    layout, h = setup.layout, shape.hidden_size
    t, s = layout.tensor, layout.tensor if layout.sequence_parallel else 1
    q, kv = shape.query_size, shape.key_value_size
    norms = (4 if "layernorm" in recompute else 8) * h / s
    qkv = 2 * (q + 2 * kv) / t + (2 * (q + kv) / t if shape.has_qk_norm else 0)
    attention = 2 * q / t + (0 if "core_attn" in recompute else 4 * shape.num_attention_heads / t)
    if shape.num_experts and not is_dense:
        return norms + qkv + attention + _expert_bytes_per_token(shape, setup, recompute)
    width = shape.dense_ffn_size if is_dense else shape.ffn_size
    return norms + qkv + attention + (0 if "mlp" in recompute else 6 * width / t)


def _expert_bytes_per_token(shape: ModelSpec, setup: PlanInput, recompute: tuple[str, ...]) -> float:
    """Count what router, routed and shared experts keep of one token, with balanced routing.

    A rank routes its own share of the sequence, 1 / s of the tokens: router 4 E / s. Expert TP gathers the
    tokens of e ranks and divides the width: K chosen experts, each with input and output 4 h e / s and
    6 f / s. Shared experts see every token: 6 f / t each, as a dense layer.
    """
    if "moe" in recompute:
        return 0
    layout, h, f = setup.layout, shape.hidden_size, shape.ffn_size
    s = layout.tensor if layout.sequence_parallel else 1
    inner = (4 if "moe_act" in recompute else 6) * f
    routed = shape.num_experts_per_token * (4 * h * layout.expert_tensor + inner) / s
    shared = 0 if "shared_experts" in recompute else shape.num_shared_experts * 6 * f / layout.tensor
    return 4 * shape.num_experts / s + routed + shared


def activation_bytes(shape: ModelSpec, setup: PlanInput, stage: int) -> int:
    """Count the activations of a stage's layers at the peak of 1F1B.

    min(p - stage, microbatches) microbatches in flight, each with tokens / c. Full recomputation keeps the
    input of each layer, 2 h / s, and at the peak all of one layer.
    """
    layout = setup.layout
    tokens = setup.train_tokens / layout.context
    layers = layout.stage_layers(shape.num_layers)[stage]
    in_flight = min(layout.pipeline - stage, setup.num_microbatches)
    if "full" in setup.recompute:
        kept = 2 * shape.hidden_size / (layout.tensor if layout.sequence_parallel else 1)
        return int(tokens * (in_flight * layers * kept + _largest_layer_bytes(shape, setup, stage)))
    num_dense = dense_layers(shape, layout, stage)
    dense = num_dense and layer_bytes_per_token(shape, setup, setup.recompute, is_dense=True)
    sparse = layer_bytes_per_token(shape, setup, setup.recompute)
    return int(tokens * in_flight * (num_dense * dense + (layers - num_dense) * sparse))


def _largest_layer_bytes(shape: ModelSpec, setup: PlanInput, stage: int) -> float:
    """Count what the stage's layer that keeps most keeps of one token."""
    num_dense = dense_layers(shape, setup.layout, stage)
    kinds = {True} if num_dense else set()
    if num_dense < setup.layout.stage_layers(shape.num_layers)[stage]:
        kinds.add(False)
    return max(layer_bytes_per_token(shape, setup, is_dense=is_dense) for is_dense in kinds)


def logit_bytes(shape: ModelSpec, setup: PlanInput, stage: int, *, scoring: bool = False) -> int:
    """Count logits and the tensors derived from them, on the last stage; a rank has V / t per token."""
    if stage != setup.layout.pipeline - 1:
        return 0
    tokens = (setup.score_tokens if scoring else setup.train_tokens) / setup.layout.context
    width = shape.vocab_size / setup.layout.tensor
    if setup.logprob_chunk:
        chunk = min(setup.logprob_chunk, tokens)
        return int(width * ((2 if scoring else CHUNKED_LOGIT_BYTES) * tokens + 12 * chunk))
    return int(width * tokens * (SCORE_LOGIT_BYTES if scoring else LOGIT_BYTES))


def training_bytes(shape: ModelSpec, setup: PlanInput, stage: int) -> dict[str, int]:
    """List the training phase of one stage, part by part."""
    if setup.embedded:
        return _embedded_bytes(shape, setup, stage)
    return {
        "weights": weight_bytes(shape, setup, stage),
        "gradients": gradient_bytes(shape, setup, stage),
        "optimizer": optimizer_bytes(shape, setup, stage),
        "activations": activation_bytes(shape, setup, stage),
        "logits": logit_bytes(shape, setup, stage),
        "allowance": ALLOWANCE,
    }


def _embedded_bytes(shape: ModelSpec, setup: PlanInput, stage: int) -> dict[str, int]:
    """List the embedded engine's parts: its precision, FP32 gradients, weights of sampler and reference.

    Adam keeps two FP32 moments, and an FP32 copy of parameters that are not FP32. The sampler holds the whole
    model, whatever the layout.
    """
    counts, each = stage_counts(shape, setup.layout, stage), setup.precision_bytes
    trained = trained_counts(shape, setup, stage)
    adapters = trained.total if setup.lora_dim else 0
    shards = setup.shards if setup.distributed_optimizer else 1
    tokens = setup.train_tokens / setup.layout.context
    layers = setup.layout.stage_layers(shape.num_layers)[stage]
    activations = tokens * layers * _local_layer_bytes(shape, setup)
    return {
        "weights": each * (counts.total + adapters),
        "reference": each * counts.total if setup.keeps_reference else 0,
        "sampler": each * model_parameters(shape),
        "gradients": 4 * trained.total,
        "optimizer": (8 if each == 4 else 12) * trained.total // shards,
        "activations": int((1 + HEAP) * activations),
        "logits": _embedded_logit_bytes(shape, setup, stage),
        "allowance": PROCESS,
    }


def _embedded_logit_bytes(shape: ModelSpec, setup: PlanInput, stage: int) -> int:
    """Count one part's logits and their gradient, and the FP32 gradient of the output matrix.

    (`engine.megatron.output_layer`)
    """
    if stage != setup.layout.pipeline - 1:
        return 0
    at_once = setup.layout.tokens_at_once(shape.vocab_size)
    tokens = min(setup.train_tokens / setup.layout.context, at_once)
    gradient = 0 if setup.lora_dim else 4 * shape.hidden_size
    return int(shape.vocab_size / setup.layout.tensor * (2 * setup.precision_bytes * tokens + gradient))


def _local_layer_bytes(shape: ModelSpec, setup: PlanInput) -> float:
    """Count what one of megatron-core's local layers keeps of one token: no kernel is fused.

    Inputs and outputs of both norms 4 h; q, k and v, q and k after rotation, the attention's output
    3 q + 3 kv; of the feed-forward layer gate and up 2 f, their copies, the activation and the product 3 f.
    Counted by torch.autograd.graph.saved_tensors_hooks on two sizes, to 2 %. Full recomputation: h.
    """
    t = setup.layout.tensor
    if "full" in setup.recompute:
        return setup.precision_bytes * shape.hidden_size
    attention = 3 * (shape.query_size + shape.key_value_size)
    return setup.precision_bytes * (4 * shape.hidden_size + (attention + 5 * shape.ffn_size) / t)


def scoring_bytes(shape: ModelSpec, setup: PlanInput, stage: int) -> int:
    """Count the scoring phase: weights, gradient buffer, one layer's activations, logits.

    NeMo-RL moves the optimizer state to the CPU before, and keeps the reference policy there.
    """
    if setup.embedded:  # no gradient, and so neither activations nor the gradients of the logits
        held = training_bytes(shape, setup, stage)
        return sum(held.values()) - held["activations"]
    logits = logit_bytes(shape, setup, stage, scoring=True)
    forward = int(setup.score_tokens / setup.layout.context * _largest_layer_bytes(shape, setup, stage))
    kept = weight_bytes(shape, setup, stage) + gradient_bytes(shape, setup, stage)
    return kept + forward + logits + ALLOWANCE


def heaviest_stage(shape: ModelSpec, setup: PlanInput) -> int:
    """Find the stage whose training phase needs most."""
    stages = range(setup.layout.pipeline)
    return max(stages, key=lambda stage: sum(training_bytes(shape, setup, stage).values()))


def rollout_weight_bytes(shape: ModelSpec, setup: PlanInput) -> int:
    """Count vLLM's weights on one GPU: BF16, or FP8 for the layers' matrices, and those of a draft model.

    vLLM divides heads, feed-forward width, experts and vocabulary by its TP; a key head is copied where there
    are fewer of them than ranks. With expert parallelism whole experts lie on EP = DP x TP ranks. The vision
    tower is counted whole.
    """
    dense, expert = rollout_layer_bytes(shape, setup)
    draft = (dense + shape.num_experts * expert) * (setup.draft_layers if setup.draft_tokens else 0)
    matrices = (1 if shape.tied_embeddings else 2) * shape.vocab_size * shape.hidden_size / setup.vllm_tensor
    num_experts = shape.num_sparse_layers * shape.num_experts
    layers = shape.num_layers * dense + num_experts * expert
    routers = num_experts * shape.hidden_size / setup.vllm_pipeline
    rest = 2 * (matrices + routers + shape.num_vision_parameters)
    return int(layers / setup.vllm_pipeline + draft + rest)


def rollout_layer_bytes(shape: ModelSpec, setup: PlanInput) -> tuple[float, float]:
    """Count (weights of a layer that every token reads, weights of one expert) per GPU of a vLLM engine.

    FP8: 1 byte; with MX, an 8-bit scale per 32 numbers, 33 / 32. Scales per 128 x 128 are not counted.
    """
    attention, feed_forward, expert = rollout_layer_sizes(shape, setup)
    width = 2 if not setup.vllm_fp8 else 33 / 32 if setup.vllm_mx else 1
    return (2 if setup.vllm_bf16_attention else width) * attention + width * feed_forward, width * expert


def rollout_layer_sizes(shape: ModelSpec, setup: PlanInput) -> tuple[float, float, float]:
    """Count a layer's weights per GPU of an engine: attention, feed-forward of all tokens, one expert."""
    tp, h = setup.vllm_tensor, shape.hidden_size
    if shape.key_value_rank:
        divided, replicated = attention_sizes(shape)
        attention = divided / tp + replicated
    else:
        kv = max(shape.num_key_value_heads / tp, 1) * shape.head_dim
        queries = (3 if shape.has_output_gate else 2) * shape.query_size / tp
        share = shape.attention_share
        attention = share * h * (queries + 2 * kv) + (1 - share) * shape.linear_sizes[0] / tp
    if not shape.num_experts:
        return attention, 3 * h * shape.ffn_size / tp, 0.0
    share = shape.num_dense_layers / shape.num_layers
    width = share * shape.dense_ffn_size + (1 - share) * shape.num_shared_experts * shape.ffn_size
    return attention, 3 * h * width / tp, 3 * h * shape.ffn_size / max(tp, setup.vllm_expert)


def cache_bytes_per_token(shape: ModelSpec, setup: PlanInput) -> float:
    """Count keys and values of one token per GPU of a vLLM engine: 2 x layers x heads x head_dim x bytes.

    Latent attention caches its compressed keys and values, whole on every rank: layers x (rank + rope).
    Linear attention's state, one per sequence, is not counted.
    """
    layers = shape.attention_share * shape.num_layers / setup.vllm_pipeline
    if shape.key_value_rank:
        return layers * (shape.key_value_rank + shape.rope_head_dim) * setup.vllm_cache_bytes
    heads = max(shape.num_key_value_heads / setup.vllm_tensor, 1)
    return 2 * layers * heads * shape.head_dim * setup.vllm_cache_bytes


def cache_bytes(shape: ModelSpec, setup: PlanInput, gpu_bytes: int) -> int:
    """Count the room for keys and values: vLLM's share less weights and workspace; may be negative."""
    return int(setup.vllm_share * gpu_bytes) - rollout_weight_bytes(shape, setup) - VLLM_WORKSPACE


def refit_bytes(shape: ModelSpec, setup: PlanInput, stage: int) -> int:
    """Count both copies of the weights, as the policy hands its own to vLLM on the same GPU."""
    return 2 * stage_counts(shape, setup.layout, stage).total + rollout_weight_bytes(shape, setup) + ALLOWANCE
