"""Memory per GPU of vLLM's engines, in bytes: weights, keys and values, and the hand-over of new weights."""

from nemo_grpo.models import ModelSpec
from nemo_grpo.plan.inputs import PlanInput
from nemo_grpo.plan.memory import ALLOWANCE, GIB
from nemo_grpo.plan.parameters import attention_sizes, stage_counts

VLLM_WORKSPACE = 4 * GIB
"""Bytes not computed: activations of vLLM's largest prefill batch, and its CUDA graphs."""


def rollout_weight_bytes(shape: ModelSpec, setup: PlanInput) -> int:
    """Count vLLM's weights on one GPU: BF16, or FP8 for the layers' matrices, and those of a draft model.

    vLLM divides heads, feed-forward width, experts and vocabulary by its TP; a key head is copied where there
    are fewer of them than ranks. With expert parallelism whole experts lie on EP = DP x TP ranks. The vision
    tower is counted whole.
    """
    dense, expert = rollout_layer_bytes(shape, setup)
    # A draft model is taken as layers like the policy's own.
    draft = 0.0
    if setup.draft_tokens:
        draft = (dense + shape.num_experts * expert) * setup.draft_layers
    num_matrices = 1 if shape.tied_embeddings else 2
    matrices = num_matrices * shape.vocab_size * shape.hidden_size / setup.vllm_tensor
    num_experts = shape.num_sparse_layers * shape.num_experts
    layers = (shape.num_layers * dense + num_experts * expert) / setup.vllm_pipeline
    routers = num_experts * shape.hidden_size / setup.vllm_pipeline
    in_bf16 = 2 * (matrices + routers + shape.num_vision_parameters)
    return int(layers + draft + in_bf16)


def rollout_layer_bytes(shape: ModelSpec, setup: PlanInput) -> tuple[float, float]:
    """Count (weights of a layer that every token reads, weights of one expert) per GPU of a vLLM engine.

    FP8: 1 byte; with MX, an 8-bit scale per 32 numbers, 33 / 32. Scales per 128 x 128 are not counted.
    """
    attention, feed_forward, expert = rollout_layer_sizes(shape, setup)
    weight_size = 2.0
    if setup.vllm_fp8:
        weight_size = 33 / 32 if setup.vllm_mx else 1.0
    attention_weight_size = 2.0 if setup.vllm_bf16_attention else weight_size
    dense = attention_weight_size * attention + weight_size * feed_forward
    return dense, weight_size * expert


def rollout_layer_sizes(shape: ModelSpec, setup: PlanInput) -> tuple[float, float, float]:
    """Count a layer's weights per GPU of an engine: attention, feed-forward of all tokens, one expert."""
    h = shape.hidden_size
    tp = setup.vllm_tensor
    if shape.key_value_rank:
        divided, replicated = attention_sizes(shape)
        attention = divided / tp + replicated
    else:
        # Projections of the queries and the output, and of the gate; a key head is never divided.
        queries = (3 if shape.has_output_gate else 2) * shape.query_size / tp
        kv = max(shape.num_key_value_heads / tp, 1) * shape.head_dim
        softmax_attention = h * (queries + 2 * kv)
        linear_attention = shape.linear_sizes[0] / tp
        share = shape.attention_share
        attention = share * softmax_attention + (1 - share) * linear_attention
    if not shape.num_experts:
        return attention, 3 * h * shape.ffn_size / tp, 0.0
    # The mean over dense layers and the shared experts of sparse ones.
    dense_share = shape.num_dense_layers / shape.num_layers
    shared_width = shape.num_shared_experts * shape.ffn_size
    width = dense_share * shape.dense_ffn_size + (1 - dense_share) * shared_width
    expert = 3 * h * shape.ffn_size / max(tp, setup.vllm_expert)
    return attention, 3 * h * width / tp, expert


def cache_bytes_per_token(shape: ModelSpec, setup: PlanInput) -> float:
    """Count the bytes of one token's keys and values per GPU of a vLLM engine.

    They are 2 x layers x heads x head_dim x bytes. Latent attention caches compressed keys and values, which
    every rank holds whole: layers x (rank + rope) x bytes. Linear attention has one state per sequence, which
    is not counted.
    """
    num_layers = shape.attention_share * shape.num_layers / setup.vllm_pipeline
    if shape.key_value_rank:
        return num_layers * (shape.key_value_rank + shape.rope_head_dim) * setup.vllm_cache_bytes
    num_heads = max(shape.num_key_value_heads / setup.vllm_tensor, 1)
    return 2 * num_layers * num_heads * shape.head_dim * setup.vllm_cache_bytes


def cache_bytes(shape: ModelSpec, setup: PlanInput, gpu_bytes: int) -> int:
    """Count the room for keys and values: vLLM's share less weights and workspace; may be negative."""
    share = int(setup.vllm_share * gpu_bytes)
    return share - rollout_weight_bytes(shape, setup) - VLLM_WORKSPACE


def refit_bytes(shape: ModelSpec, setup: PlanInput, stage: int) -> int:
    """Count both copies of the weights, as the policy hands its own to vLLM on the same GPU."""
    policy_weights = 2 * stage_counts(shape, setup.layout, stage).total
    return policy_weights + rollout_weight_bytes(shape, setup) + ALLOWANCE
