"""Seconds of scoring and of the update with megatron-core.

FLOPs: a product of [n, k] with [k, m] costs 2 n k m; the backward pass costs twice the forward pass, full
recomputation once more (Narayanan et al., 2104.04473, appendix). Causal attention computes half of the score
matrix. Stages work in 1F1B, whose bubble is (p - 1) microbatches of the slowest stage (same, section 2.2).
"""

from dataclasses import dataclass
from math import ceil

from nemo_grpo.models import ModelSpec
from nemo_grpo.plan import memory
from nemo_grpo.plan.case import Case, exchange_seconds, gather_seconds
from nemo_grpo.plan.parameters import mixer_sizes, stage_counts


@dataclass(frozen=True)
class Microbatches:
    """Microbatches into which a data-parallel rank cuts its sequences of one update.

    Attributes: number: of microbatches.  tokens: of one, padding too, before CP divides them.
    """

    number: int
    tokens: float


def microbatches(case: Case, capacity: int) -> Microbatches:
    """Microbatches of one update; packed rows hold whole sequences, padded ones have the longest length."""
    setup, work = case.setup, case.work
    sequences = max(work.num_samples / work.num_updates / setup.data_parallel, 1.0)  # others wait for one
    if not setup.packed:
        number = max(round(sequences * setup.max_length / capacity), 1)
        return Microbatches(number, sequences * setup.max_length / number)
    tokens = sequences * work.lengths.mean_sequence
    rows = max(ceil(tokens / work.lengths.packed(capacity)), 1)
    return Microbatches(rows, tokens / rows)


def layer_flops(shape: ModelSpec, attended: float, *, is_dense: bool = True) -> tuple[float, float, float]:
    """FLOPs of one token in one layer's forward pass: (dense products, attention, the chosen experts').

    Attention: scores and weighted values, 2 x 2 x width of all heads x attended tokens. Layers with linear
    attention are spread evenly over all; of theirs only the matrices are counted.
    """
    divided, replicated = mixer_sizes(shape)
    attended *= shape.attention_share
    h, f = shape.hidden_size, shape.ffn_size
    if shape.key_value_rank:
        scores = 2 * attended * shape.num_attention_heads * (2 * shape.head_dim + shape.rope_head_dim)
    else:
        scores = 4 * attended * shape.query_size
    dense, experts = float(divided + replicated), 0
    if shape.num_experts and not is_dense:
        dense += shape.num_experts * h + shape.num_shared_experts * 3 * h * f
        experts = shape.num_experts_per_token * 3 * h * f
    else:
        dense += 3 * h * (shape.dense_ffn_size or f)
    return 2 * dense, scores, 2 * experts


def model_flops(shape: ModelSpec, attended: float) -> float:
    """FLOPs of one token's forward pass through the whole model, the embedding's look-up left out."""
    head = 2 * shape.vocab_size * shape.hidden_size
    dense = (shape.num_layers - shape.num_sparse_layers) * sum(layer_flops(shape, attended))
    return dense + shape.num_sparse_layers * sum(layer_flops(shape, attended, is_dense=False)) + head


def layer_seconds(case: Case, tokens: float, *, is_dense: bool) -> tuple[float, float]:
    """One layer's forward pass over a microbatch's tokens / CP: (kernels, collectives of TP, CP and EP).

    Routing is taken as balanced: each of the TP x EP ranks computes its share of the experts' products.
    With FP8 the products run at its peak, after their inputs are read and written once more to quantize
    them: the gain falls with the width of the matrices.
    """
    setup, hardware, eff, layout = case.setup, case.hardware, case.eff, case.setup.layout
    products, scores, experts = layer_flops(case.shape, case.work.lengths.attended, is_dense=is_dense)
    flops = hardware.fp8_flops if setup.fp8_training else hardware.bf16_flops
    kernels = tokens * products / layout.tensor / (flops * eff.matrix)
    kernels += tokens * scores / layout.tensor / (hardware.bf16_flops * eff.matrix)
    kernels += tokens * experts / layout.tensor / (flops * eff.grouped)
    if setup.fp8_training:
        kernels += tokens * _quantized(case, is_dense) / (hardware.memory_bandwidth * eff.memory)
    kernels = max(kernels, case.host * eff.layer if is_dense else eff.expert_layer)
    return kernels, _layer_talk(case, tokens, is_dense=is_dense)


def _quantized(case: Case, is_dense: bool) -> float:
    """Bytes per token to quantize the inputs of a layer's products: read 2, write 1, and transposed 1."""
    shape, t = case.shape, case.setup.layout.tensor
    h = shape.hidden_size
    width = 2 * h + (shape.query_size + (shape.dense_ffn_size or shape.ffn_size)) / t
    if not is_dense:
        width = 2 * h + shape.query_size / t + shape.num_experts_per_token * (h + shape.ffn_size)
    return 4 * width


def _layer_talk(case: Case, tokens: float, *, is_dense: bool) -> float:
    """TP: an all-gather and a reduce-scatter around attention and feed-forward (2205.05198, section 4.2.2).

    CP: the ring passes the keys and values of the other ranks. EP: tokens go to their experts and return.
    """
    shape, layout = case.shape, case.setup.layout
    width = 2 * shape.hidden_size * tokens
    t, c, model_parallel = layout.tensor, layout.context, layout.tensor * layout.context
    seconds = 4 * gather_seconds(case, width, t, t)
    if c > 1:
        passed = 2 * 2 * shape.key_value_size / t * tokens * c
        seconds += gather_seconds(case, passed, c, model_parallel)
    if not is_dense and layout.expert > 1:
        sent = shape.num_experts_per_token * width / (t if layout.sequence_parallel else 1)
        seconds += 2 * exchange_seconds(case, sent, layout.expert, layout.expert_tensor)
    return seconds


def head_seconds(case: Case, tokens: float) -> float:
    """Logits of the last stage and their logprobs: the product, then three passes over FP32 logits."""
    shape, hardware, eff = case.shape, case.hardware, case.eff
    width = shape.vocab_size / case.setup.layout.tensor
    product = 2 * tokens * width * shape.hidden_size / (hardware.bf16_flops * eff.matrix)
    return product + 3 * 4 * tokens * width / (hardware.memory_bandwidth * eff.memory)


def stage_seconds(case: Case, tokens: float) -> float:
    """The slowest stage's forward pass over one microbatch."""
    shape, layout = case.shape, case.setup.layout
    has_dense = shape.num_dense_layers or not shape.num_experts
    dense = sum(layer_seconds(case, tokens, is_dense=True)) if has_dense else 0.0
    sparse = sum(layer_seconds(case, tokens, is_dense=False)) if shape.num_experts else 0.0
    dealt, left, slowest = layout.stage_layers(shape.num_layers), shape.num_dense_layers, 0.0
    for stage, layers in enumerate(dealt):
        num_dense = min(left, layers) if shape.num_experts else layers
        left -= num_dense
        seconds = num_dense * dense + (layers - num_dense) * sparse
        if stage == len(dealt) - 1:
            seconds += head_seconds(case, tokens)
        slowest = max(slowest, seconds)
    return slowest


def bubble(stages: int, number: int) -> float:
    """Factor by which waiting lengthens a stage's time: (m + p - 1) / m."""
    return (number + stages - 1) / number


def scoring_seconds(case: Case) -> float:
    """One forward pass over all of the step's sequences."""
    layout = case.setup.layout
    cut = microbatches(case, case.setup.score_tokens)
    number = cut.number * case.work.num_updates
    return number * bubble(layout.pipeline, number) * stage_seconds(case, cut.tokens / layout.context)


def update_seconds(case: Case) -> dict[str, float]:
    """All updates of a step: forward and backward, the pipeline's bubble, gradients, the optimizer.

    Backward is two forward passes, and recomputation another; selective recomputation of attention alone
    repeats its scores, which is neglected. The reduce-scatter of the gradients and the all-gather of the
    parameters overlap with the last microbatch's backward pass and the next update's first forward pass.
    """
    setup, layout, num_updates = case.setup, case.setup.layout, case.work.num_updates
    cut = microbatches(case, setup.train_tokens)
    one = stage_seconds(case, cut.tokens / layout.context)
    passes = 4 if "full" in setup.recompute else 3
    busy = cut.number * passes * one
    stage = memory.heaviest_stage(case.shape, setup)
    reduced = max(_gradient_seconds(case, stage) - passes * one, 0.0)
    return {
        "forward and backward": num_updates * busy,
        "pipeline bubble": num_updates * busy * (bubble(layout.pipeline, cut.number) - 1),
        "gradients": num_updates * reduced,
        "optimizer": num_updates * _optimizer_seconds(case, stage),
    }


def _gradient_seconds(case: Case, stage: int) -> float:
    """Reduce-scatter of the gradients and all-gather of BF16 parameters over the ranks that share a part."""
    setup, counts = case.setup, memory.trained_counts(case.shape, case.setup, stage)
    per_parameter = setup.grad_bytes + 2
    world = setup.world_size // setup.layout.pipeline
    dense = gather_seconds(case, per_parameter * counts.dense, setup.shards, world)
    return dense + gather_seconds(case, per_parameter * counts.expert, setup.expert_shards, world)


def _optimizer_seconds(case: Case, stage: int) -> float:
    """Adam reads and writes its state and reads gradients; what is offloaded goes over the host's bus."""
    setup, hardware, eff = case.setup, case.hardware, case.eff
    counts = memory.trained_counts(case.shape, setup, stage)
    each = memory.optimizer_bytes_per_parameter(setup)
    shards, expert_shards = (setup.shards, setup.expert_shards) if setup.distributed_optimizer else (1, 1)
    moved = (2 * each + setup.grad_bytes) * (counts.dense / shards + counts.expert / expert_shards)
    away = setup.offload_fraction
    rate = hardware.memory_bandwidth * eff.memory
    return moved * (1 - away) / rate + moved * away / (hardware.host_bandwidth * eff.link)


def swap_seconds(case: Case, *, reference: bool) -> float:
    """Moves over the host's bus per step: the optimizer out and in where rollouts share the GPUs, and the
    reference policy's weights in and the policy's back.
    """
    shape, setup = case.shape, case.setup
    stage = memory.heaviest_stage(shape, setup)
    state = 0.0 if setup.num_rollout_gpus else 2.0 * memory.optimizer_bytes(shape, setup, stage)
    weights = 2 * 2 * stage_counts(shape, setup.layout, stage).total if reference else 0
    return (state + weights) / (case.hardware.host_bandwidth * case.eff.link)
