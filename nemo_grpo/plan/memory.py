"""Memory per GPU that trains, in bytes. Every formula counts tensors; one stated allowance covers the rest.

Conventions: h hidden size, q and kv widths of all query and all key heads, f feed-forward width, V
vocabulary, L layers, E experts, K experts per token, t TP, p PP, c CP, s = t with sequence parallelism and
else 1. BF16 has 2 bytes. Ranks of a pipeline differ, so everything is per stage, and the heaviest stage
counts.
"""

from nemo_grpo.models import ModelSpec
from nemo_grpo.plan.inputs import PlanInput
from nemo_grpo.plan.parameters import (
    Counts,
    adapter_counts,
    dense_layers,
    model_parameters,
    stage_counts,
)

GIB = 1024**3
USABLE = 0.92
"""Share of a GPU's memory that a plan may fill; the rest is for the allocator's fragments."""

ALLOWANCE = 6 * GIB
"""Bytes not computed: two CUDA contexts, NCCL buffers, GEMM workspaces, a sleeping vLLM's remainder."""

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
    """Count the bytes of the BF16 parameters, adapters included.

    FP8 training also caches two FP8 copies of each matrix, row-wise and column-wise, as Transformer Engine
    does:  2 n + 2 (linear + expert).
    """
    counts = stage_counts(shape, setup.layout, stage)
    num_parameters = counts.total
    if setup.lora_dim:
        num_parameters += trained_counts(shape, setup, stage).total
    fp8_copies = 0
    if setup.fp8_training:
        fp8_copies = 2 * (counts.linear + counts.expert)
    return 2 * num_parameters + fp8_copies


def gradient_bytes(shape: ModelSpec, setup: PlanInput, stage: int) -> int:
    """Count the gradient buffer of megatron-core's DDP, unsharded: BF16, or FP32 if it reduces in FP32."""
    return setup.grad_bytes * trained_counts(shape, setup, stage).total


def optimizer_bytes_per_parameter(setup: PlanInput) -> int:
    """Count the optimizer state of one parameter, before sharding.

    Adam has an FP32 parameter of 4 bytes, two moments of 8, and 4 for the FP32 copy of a BF16 gradient that
    the update makes. The precision-aware optimizer stores only the 16 bits by which an FP32 parameter exceeds
    its BF16 one, and reads the gradient as it is: 2 + 8.
    (megatron/core/optimizer: distrib_optimizer.py, store_param_remainders.)
    """
    moments = 8 if setup.optimizer == "adam" else 4
    if setup.precision_aware:
        remainder = 2
        return remainder + moments
    parameter = 4
    gradient_copy = 4 if setup.grad_bytes == 2 or not setup.distributed_optimizer else 0
    return parameter + moments + gradient_copy


def optimizer_bytes(shape: ModelSpec, setup: PlanInput, stage: int) -> int:
    """Count one rank's optimizer state, sharded over DP x CP; an expert's over the ranks that hold it."""
    counts = trained_counts(shape, setup, stage)
    bytes_per_parameter = optimizer_bytes_per_parameter(setup)
    dense_shards, expert_shards = optimizer_shards(setup)
    dense = bytes_per_parameter * counts.dense // dense_shards
    expert = bytes_per_parameter * counts.expert // expert_shards
    return int((dense + expert) * (1 - setup.offload_fraction))


def optimizer_shards(setup: PlanInput) -> tuple[int, int]:
    """Return the ranks that share the optimizer state of (a dense parameter, an expert's parameter)."""
    if not setup.distributed_optimizer:
        return 1, 1
    return setup.shards, setup.expert_shards


def sequence_split(setup: PlanInput) -> int:
    """Return s: the ranks that share a sequence between the layers, TP with sequence parallelism, else 1."""
    return setup.layout.tensor if setup.layout.sequence_parallel else 1


def layer_bytes_per_token(
    shape: ModelSpec, setup: PlanInput, recompute: tuple[str, ...] = (), *, is_dense: bool = False
) -> float:
    """Count what one layer keeps of one token for its backward pass, with flash attention and no dropout.

        inputs and outputs of both norms             8 h / s
        q, k, v and the output of the attention      2 (2 q + 2 kv) / t
        inputs of the norms on q and k, if any       2 (q + kv) / t
        log-sum-exp of the attention                 4 heads / t
        gate and up                                  4 f / t
        their product                                2 f / t        (experts: `_expert_bytes_per_token`)

    s is t with sequence parallelism, else 1. The terms are those of Korthikanti et al. (2205.05198) for a
    gated feed-forward layer, grouped queries and no stored attention matrix. Linear attention is assumed to
    keep as much as attention.

    Args:
        shape: the model.
        setup: its layout.
        recompute: megatron-core's names of modules whose inner tensors are not kept.
        is_dense: one of the dense layers of a model with experts.
    Returns: bytes per token of the sequence part that the rank has, before CP.
    """
    h = shape.hidden_size
    q = shape.query_size
    kv = shape.key_value_size
    t = setup.layout.tensor
    s = sequence_split(setup)
    # Recomputed norms keep their inputs, and not their outputs.
    norms = (4 if "layernorm" in recompute else 8) * h / s
    qkv = 2 * (q + 2 * kv) / t
    if shape.has_qk_norm:
        qkv += 2 * (q + kv) / t
    attention = 2 * q / t
    if "core_attn" not in recompute:
        attention += 4 * shape.num_attention_heads / t
    if shape.num_experts and not is_dense:
        return norms + qkv + attention + _expert_bytes_per_token(shape, setup, recompute)
    f = shape.dense_ffn_size if is_dense else shape.ffn_size
    feed_forward = 0 if "mlp" in recompute else 6 * f / t
    return norms + qkv + attention + feed_forward


def _expert_bytes_per_token(shape: ModelSpec, setup: PlanInput, recompute: tuple[str, ...]) -> float:
    """Count the bytes that router, routed and shared experts keep of one token, with balanced routing.

        router              4 E / s
        each routed expert  (4 h e + 6 f) / s       K of them per token; e is the expert TP
        each shared expert  6 f / t                 as in a dense layer

    A rank routes its own share of the sequence, 1 / s of the tokens. Expert TP gathers the tokens of e ranks
    (input and output, 4 h e) and divides the width f by e. Shared experts see every token.
    """
    if "moe" in recompute:
        return 0
    h = shape.hidden_size
    f = shape.ffn_size
    s = sequence_split(setup)
    router = 4 * shape.num_experts / s
    ends = 4 * h * setup.layout.expert_tensor
    inner = (4 if "moe_act" in recompute else 6) * f
    routed = shape.num_experts_per_token * (ends + inner) / s
    shared = 0.0
    if "shared_experts" not in recompute:
        shared = shape.num_shared_experts * 6 * f / setup.layout.tensor
    return router + routed + shared


def activation_bytes(shape: ModelSpec, setup: PlanInput, stage: int) -> int:
    """Count the activations of a stage's layers at the peak of 1F1B.

    Then min(p - stage, microbatches) microbatches are in flight, each with tokens / c on this rank. Full
    recomputation keeps only the input of each layer, 2 h / s, and at the peak everything of one layer.
    """
    layout = setup.layout
    tokens = setup.train_tokens / layout.context
    num_layers = layout.stage_layers(shape.num_layers)[stage]
    # Earlier stages start more forward passes before the first backward pass returns to them.
    in_flight = min(layout.pipeline - stage, setup.num_microbatches)
    if "full" in setup.recompute:
        layer_input = 2 * shape.hidden_size / sequence_split(setup)
        inputs = in_flight * num_layers * layer_input
        recomputed_layer = _largest_layer_bytes(shape, setup, stage)
        return int(tokens * (inputs + recomputed_layer))
    num_dense = dense_layers(shape, layout, stage)
    dense = 0.0
    if num_dense:
        dense = num_dense * layer_bytes_per_token(shape, setup, setup.recompute, is_dense=True)
    sparse = (num_layers - num_dense) * layer_bytes_per_token(shape, setup, setup.recompute)
    return int(tokens * in_flight * (dense + sparse))


def _largest_layer_bytes(shape: ModelSpec, setup: PlanInput, stage: int) -> float:
    """Count the bytes per token of the stage's layer that keeps most, without recomputation."""
    num_layers = setup.layout.stage_layers(shape.num_layers)[stage]
    num_dense = dense_layers(shape, setup.layout, stage)
    layer_sizes = []
    if num_dense:
        layer_sizes.append(layer_bytes_per_token(shape, setup, is_dense=True))
    if num_dense < num_layers:
        layer_sizes.append(layer_bytes_per_token(shape, setup, is_dense=False))
    return max(layer_sizes)


def logit_bytes(shape: ModelSpec, setup: PlanInput, stage: int, *, scoring: bool = False) -> int:
    """Count logits and the tensors derived from them, on the last stage; a rank has V / t per token."""
    if stage != setup.layout.pipeline - 1:
        return 0
    tokens = (setup.score_tokens if scoring else setup.train_tokens) / setup.layout.context
    logits_per_token = shape.vocab_size / setup.layout.tensor
    if setup.logprob_chunk:
        # BF16 logits of all tokens, with a gradient in training. FP32 copy, log-softmax and softmax (3 x 4
        # bytes) exist for the tokens of one chunk.
        whole = (2 if scoring else CHUNKED_LOGIT_BYTES) * tokens
        chunk = 12 * min(setup.logprob_chunk, tokens)
        return int(logits_per_token * (whole + chunk))
    bytes_per_logit = SCORE_LOGIT_BYTES if scoring else LOGIT_BYTES
    return int(logits_per_token * tokens * bytes_per_logit)


def training_bytes(shape: ModelSpec, setup: PlanInput, stage: int) -> dict[str, int]:
    """Compute the bytes of each part of one stage's training phase: name -> bytes."""
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
    """Compute the bytes of each part of the embedded engine's training phase: name -> bytes.

    The sampler's and the reference policy's weights are in memory beside the policy's. Gradients are FP32.
    Adam keeps two FP32 moments, and an FP32 copy of parameters that are not FP32. The sampler holds the whole
    model, whatever the layout.
    """
    weight_size = setup.precision_bytes
    counts = stage_counts(shape, setup.layout, stage)
    trained = trained_counts(shape, setup, stage)
    num_adapter_parameters = trained.total if setup.lora_dim else 0
    state_size = 8 if weight_size == 4 else 12
    shards, _ = optimizer_shards(setup)
    tokens = setup.train_tokens / setup.layout.context
    num_layers = setup.layout.stage_layers(shape.num_layers)[stage]
    activations = tokens * num_layers * _local_layer_bytes(shape, setup)
    return {
        "weights": weight_size * (counts.total + num_adapter_parameters),
        "reference": weight_size * counts.total if setup.keeps_reference else 0,
        "sampler": weight_size * model_parameters(shape),
        "gradients": 4 * trained.total,
        "optimizer": state_size * trained.total // shards,
        "activations": int((1 + HEAP) * activations),
        "logits": _embedded_logit_bytes(shape, setup, stage),
        "allowance": PROCESS,
    }


def _embedded_logit_bytes(shape: ModelSpec, setup: PlanInput, stage: int) -> int:
    """Count the logits that exist at once, their gradient, and the FP32 gradient of the output matrix.

    `engine.megatron.output_layer` computes the logits of `tokens_at_once` tokens at a time.
    """
    if stage != setup.layout.pipeline - 1:
        return 0
    tokens_at_once = setup.layout.tokens_at_once(shape.vocab_size)
    tokens = min(setup.train_tokens / setup.layout.context, tokens_at_once)
    # Per column of the output matrix: a logit and its gradient per token, and the column's own gradient.
    logits = 2 * setup.precision_bytes * tokens
    matrix_gradient = 0 if setup.lora_dim else 4 * shape.hidden_size
    return int(shape.vocab_size / setup.layout.tensor * (logits + matrix_gradient))


def _local_layer_bytes(shape: ModelSpec, setup: PlanInput) -> float:
    """Count what one of megatron-core's local layers keeps of one token: no kernel is fused.

        inputs and outputs of both norms                                      4 h
        q, k and v, q and k after rotation, the output of the attention       3 q + 3 kv
        gate and up of the feed-forward layer                                 2 f
        their copies, the activation and the product                          3 f

    These numbers agree to 2 % with counts by torch.autograd.graph.saved_tensors_hooks on two sizes. Full
    recomputation keeps h.
    """
    h = shape.hidden_size
    if "full" in setup.recompute:
        return setup.precision_bytes * h
    norms = 4 * h
    attention = 3 * (shape.query_size + shape.key_value_size)
    feed_forward = 5 * shape.ffn_size
    return setup.precision_bytes * (norms + (attention + feed_forward) / setup.layout.tensor)


def scoring_bytes(shape: ModelSpec, setup: PlanInput, stage: int) -> int:
    """Count the bytes of the scoring phase: weights, gradient buffer, one layer's activations, logits.

    NeMo-RL moves the optimizer state to the CPU before it scores, and keeps the reference policy there.
    """
    if setup.embedded:
        # Scoring keeps no activations for a backward pass. The other parts are counted as in training.
        parts = training_bytes(shape, setup, stage)
        return sum(parts.values()) - parts["activations"]
    tokens = setup.score_tokens / setup.layout.context
    weights = weight_bytes(shape, setup, stage)
    gradients = gradient_bytes(shape, setup, stage)
    layer = int(tokens * _largest_layer_bytes(shape, setup, stage))
    logits = logit_bytes(shape, setup, stage, scoring=True)
    return weights + gradients + layer + logits + ALLOWANCE


def heaviest_stage(shape: ModelSpec, setup: PlanInput) -> int:
    """Find the stage whose training phase needs most."""
    stages = range(setup.layout.pipeline)
    return max(stages, key=lambda stage: sum(training_bytes(shape, setup, stage).values()))
