"""Time of scoring and of the update with megatron-core.

FLOPs: a product of [n, k] with [k, m] costs 2 n k m; the backward pass costs twice the forward pass, full
recomputation once more (Narayanan et al., 2104.04473, appendix). Causal attention computes half of the score
matrix. Stages work in 1F1B, whose bubble is (p - 1) microbatches of the slowest stage (same, section 2.2).
"""

from math import ceil

from nemo_grpo.models import ModelSpec
from nemo_grpo.plan import memory
from nemo_grpo.plan.parameters import mixer_sizes, stage_counts
from nemo_grpo.plan.scenario import Scenario, exchange_seconds, gather_seconds


def microbatches(scenario: Scenario, capacity: int) -> tuple[int, float]:
    """Count a data-parallel rank's microbatches of one update, and tokens of one with padding, before CP.

    Packed rows hold whole sequences; padded sequences have the longest length.
    """
    setup, work = scenario.setup, scenario.work
    sequences = max(work.num_samples / work.num_updates / setup.data_parallel, 1.0)  # others wait for one
    if not setup.packed:
        number = max(round(sequences * setup.max_length / capacity), 1)
        return number, sequences * setup.max_length / number
    tokens = sequences * work.lengths.mean_sequence
    rows = max(ceil(tokens / work.lengths.packed(capacity)), 1)
    return rows, tokens / rows


def layer_flops(shape: ModelSpec, attended: float, *, is_dense: bool = True) -> tuple[float, float, float]:
    """Count FLOPs of one token in one layer's forward pass: (dense products, attention, the chosen experts').

    Attention: scores and weighted values, 2 x 2 x width of all heads x attended tokens. Linear attention is
    averaged over all layers, and counts by its matrices alone.
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
    """Count FLOPs of one token's forward pass through the whole model, without the embedding's look-up."""
    head = 2 * shape.vocab_size * shape.hidden_size
    dense = (shape.num_layers - shape.num_sparse_layers) * sum(layer_flops(shape, attended))
    return dense + shape.num_sparse_layers * sum(layer_flops(shape, attended, is_dense=False)) + head


def layer_seconds(scenario: Scenario, tokens: float, *, is_dense: bool) -> tuple[float, float]:
    """Time one layer's forward pass over a microbatch's tokens / CP: (kernels, collectives of TP, CP, EP).

    Routing is taken as balanced: each of the TP x EP ranks computes its share of the experts' products.
    With FP8 the products run at its peak, but their inputs are read and written once more to quantize them:
    narrow matrices gain less.
    """
    setup, hardware, eff, layout = scenario.setup, scenario.hardware, scenario.eff, scenario.setup.layout
    products, scores, experts = layer_flops(scenario.shape, scenario.work.lengths.attended, is_dense=is_dense)
    flops = hardware.fp8_flops if setup.fp8_training else hardware.bf16_flops
    kernels = tokens * products / layout.tensor / (flops * eff.matrix)
    kernels += tokens * scores / layout.tensor / (hardware.bf16_flops * eff.matrix)
    kernels += tokens * experts / layout.tensor / (flops * eff.grouped)
    if setup.fp8_training:
        kernels += tokens * _quantized(scenario, is_dense) / (hardware.memory_bandwidth * eff.memory)
    kernels = max(kernels, hardware.host_slowdown * eff.layer if is_dense else eff.expert_layer)
    return kernels, _layer_talk(scenario, tokens, is_dense=is_dense)


def _quantized(scenario: Scenario, is_dense: bool) -> float:
    """Count bytes per token to quantize the inputs of a layer's products: read 2, write 1, transposed 1."""
    shape, t = scenario.shape, scenario.setup.layout.tensor
    h = shape.hidden_size
    width = 2 * h + (shape.query_size + (shape.dense_ffn_size or shape.ffn_size)) / t
    if not is_dense:
        width = 2 * h + shape.query_size / t + shape.num_experts_per_token * (h + shape.ffn_size)
    return 4 * width


def _layer_talk(scenario: Scenario, tokens: float, *, is_dense: bool) -> float:
    """Time the collectives of one layer's forward pass.

    TP: an all-gather and a reduce-scatter around attention and feed-forward (2205.05198, section 4.2.2). CP:
    the ring passes the keys and values of the other ranks. EP: tokens go to their experts and return.
    """
    shape, layout = scenario.shape, scenario.setup.layout
    width = 2 * shape.hidden_size * tokens
    t, c, model_parallel = layout.tensor, layout.context, layout.tensor * layout.context
    seconds = 4 * gather_seconds(scenario, width, t, t)
    if c > 1:
        passed = 2 * 2 * shape.key_value_size / t * tokens * c
        seconds += gather_seconds(scenario, passed, c, model_parallel)
    if not is_dense and layout.expert > 1:
        sent = shape.num_experts_per_token * width / (t if layout.sequence_parallel else 1)
        seconds += 2 * exchange_seconds(scenario, sent, layout.expert, layout.expert_tensor)
    return seconds


def head_seconds(scenario: Scenario, tokens: float) -> float:
    """Time the last stage's logits and logprobs: the product, then three passes over FP32 logits."""
    shape, hardware, eff = scenario.shape, scenario.hardware, scenario.eff
    width = shape.vocab_size / scenario.setup.layout.tensor
    product = 2 * tokens * width * shape.hidden_size / (hardware.bf16_flops * eff.matrix)
    return product + 3 * 4 * tokens * width / (hardware.memory_bandwidth * eff.memory)


def stage_seconds(scenario: Scenario, tokens: float) -> float:
    """Time the slowest stage's forward pass over one microbatch."""
    shape, layout = scenario.shape, scenario.setup.layout
    has_dense = shape.num_dense_layers or not shape.num_experts
    dense = sum(layer_seconds(scenario, tokens, is_dense=True)) if has_dense else 0.0
    sparse = sum(layer_seconds(scenario, tokens, is_dense=False)) if shape.num_experts else 0.0
    dealt, left, slowest = layout.stage_layers(shape.num_layers), shape.num_dense_layers, 0.0
    for stage, layers in enumerate(dealt):
        num_dense = min(left, layers) if shape.num_experts else layers
        left -= num_dense
        seconds = num_dense * dense + (layers - num_dense) * sparse
        if stage == len(dealt) - 1:
            seconds += head_seconds(scenario, tokens)
        slowest = max(slowest, seconds)
    return slowest


def bubble(stages: int, number: int) -> float:
    """Compute the factor by which waiting lengthens a stage's time: (m + p - 1) / m."""
    return (number + stages - 1) / number


def scoring_seconds(scenario: Scenario) -> float:
    """Time one forward pass over all of the step's sequences."""
    layout = scenario.setup.layout
    number, tokens = microbatches(scenario, scenario.setup.score_tokens)
    number *= scenario.work.num_updates
    return number * bubble(layout.pipeline, number) * stage_seconds(scenario, tokens / layout.context)


def update_seconds(scenario: Scenario) -> dict[str, float]:
    """Time all updates of a step: forward and backward, the pipeline's bubble, gradients, the optimizer.

    The backward pass counts as two forward passes, full recomputation as another; selective recomputation is
    neglected. The reduce-scatter of the gradients and the all-gather of the parameters overlap with the last
    microbatch's backward pass and the next update's first forward pass.
    """
    setup, layout, num_updates = scenario.setup, scenario.setup.layout, scenario.work.num_updates
    number, tokens = microbatches(scenario, setup.train_tokens)
    one = stage_seconds(scenario, tokens / layout.context)
    passes = 4 if "full" in setup.recompute else 3
    busy = number * passes * one
    stage = memory.heaviest_stage(scenario.shape, setup)
    reduced = max(_gradient_seconds(scenario, stage) - passes * one, 0.0)
    return {
        "forward and backward": num_updates * busy,
        "pipeline bubble": num_updates * busy * (bubble(layout.pipeline, number) - 1),
        "gradients": num_updates * reduced,
        "optimizer": num_updates * _optimizer_seconds(scenario, stage),
    }


def _gradient_seconds(scenario: Scenario, stage: int) -> float:
    """Time the reduce-scatter of the gradients and the all-gather of BF16 parameters over their shards."""
    setup, counts = scenario.setup, memory.trained_counts(scenario.shape, scenario.setup, stage)
    per_parameter = setup.grad_bytes + 2
    world = setup.world_size // setup.layout.pipeline
    dense = gather_seconds(scenario, per_parameter * counts.dense, setup.shards, world)
    return dense + gather_seconds(scenario, per_parameter * counts.expert, setup.expert_shards, world)


def _optimizer_seconds(scenario: Scenario, stage: int) -> float:
    """Time Adam: state read and written, gradients read, the offloaded share over the host's bus."""
    setup, hardware, eff = scenario.setup, scenario.hardware, scenario.eff
    counts = memory.trained_counts(scenario.shape, setup, stage)
    each = memory.optimizer_bytes_per_parameter(setup)
    shards, expert_shards = (setup.shards, setup.expert_shards) if setup.distributed_optimizer else (1, 1)
    moved = (2 * each + setup.grad_bytes) * (counts.dense / shards + counts.expert / expert_shards)
    away = setup.offload_fraction
    rate = hardware.memory_bandwidth * eff.memory
    return moved * (1 - away) / rate + moved * away / (hardware.host_bandwidth * eff.link)


def swap_seconds(scenario: Scenario, *, reference: bool) -> float:
    """Time the moves over the host's bus per step.

    The optimizer goes out and in if rollouts share the GPUs; the reference policy's weights come in, and the
    policy's go back.
    """
    shape, setup = scenario.shape, scenario.setup
    stage = memory.heaviest_stage(shape, setup)
    state = 0.0 if setup.num_rollout_gpus else 2.0 * memory.optimizer_bytes(shape, setup, stage)
    weights = 2 * 2 * stage_counts(shape, setup.layout, stage).total if reference else 0
    return (state + weights) / (scenario.hardware.host_bandwidth * scenario.eff.link)
