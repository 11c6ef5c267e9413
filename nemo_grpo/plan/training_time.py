"""Time of scoring and of the update with megatron-core.

FLOPs: a product of [n, k] with [k, m] costs 2 n k m; the backward pass costs twice the forward pass, full
recomputation once more (Narayanan et al., 2104.04473, appendix). Causal attention computes half of the score
matrix. Stages work in 1F1B, whose bubble is (p - 1) microbatches of the slowest stage (same, section 2.2).
"""

from math import ceil

from nemo_grpo.models import ModelSpec
from nemo_grpo.plan import memory
from nemo_grpo.plan.parameters import dense_layers, mixer_sizes, stage_counts
from nemo_grpo.plan.scenario import Scenario, exchange_seconds, gather_seconds


def microbatches(scenario: Scenario, capacity: int) -> tuple[int, float]:
    """Count the microbatches of one update on a data-parallel rank, and the tokens of each.

    Args:
        scenario: the recipe's scenario.
        capacity: tokens that a microbatch may have.
    Returns: the number of microbatches; and tokens of one, before CP divides them. With packing a microbatch
        holds whole sequences; without it every sequence is padded to the longest possible length.
    """
    setup = scenario.setup
    work = scenario.work
    # With fewer sequences than ranks some ranks have one, and the others wait for them.
    sequences = max(work.num_samples / work.num_updates / setup.data_parallel, 1.0)
    if not setup.packed:
        padded_tokens = sequences * setup.max_length
        num_microbatches = max(round(padded_tokens / capacity), 1)
        return num_microbatches, padded_tokens / num_microbatches
    tokens = sequences * work.lengths.mean_sequence
    num_rows = max(ceil(tokens / work.lengths.packed(capacity)), 1)
    return num_rows, tokens / num_rows


def layer_flops(shape: ModelSpec, attended: float, *, is_dense: bool = True) -> tuple[float, float, float]:
    """Count FLOPs of one token in one layer's forward pass.

    Attention: scores and weighted values, 2 x 2 x width of all heads x attended tokens. Linear attention is
    averaged over all layers, and counts by its matrices alone.

    Args:
        shape: the model.
        attended: mean tokens that a token attends to.
        is_dense: a layer without experts.
    Returns: FLOPs of (dense products, attention, the products of the token's routed experts).
    """
    h = shape.hidden_size
    f = shape.ffn_size
    attended *= shape.attention_share
    if shape.key_value_rank:
        # Latent attention: keys have an additional rotary part, values have not.
        attention = 2 * attended * shape.num_attention_heads * (2 * shape.head_dim + shape.rope_head_dim)
    else:
        attention = 4 * attended * shape.query_size
    divided, replicated = mixer_sizes(shape)
    dense_weights = float(divided + replicated)
    expert_weights = 0
    if shape.num_experts and not is_dense:
        router = shape.num_experts * h
        shared_experts = shape.num_shared_experts * 3 * h * f
        dense_weights += router + shared_experts
        expert_weights = shape.num_experts_per_token * 3 * h * f
    else:
        dense_weights += 3 * h * (shape.dense_ffn_size or f)
    return 2 * dense_weights, attention, 2 * expert_weights


def model_flops(shape: ModelSpec, attended: float) -> float:
    """Count FLOPs of one token's forward pass through the whole model, without the embedding's look-up."""
    head = 2 * shape.vocab_size * shape.hidden_size
    num_dense_layers = shape.num_layers - shape.num_sparse_layers
    dense = num_dense_layers * sum(layer_flops(shape, attended))
    sparse = shape.num_sparse_layers * sum(layer_flops(shape, attended, is_dense=False))
    return dense + sparse + head


def layer_seconds(scenario: Scenario, tokens: float, *, is_dense: bool) -> tuple[float, float]:
    """Time one layer's forward pass over the tokens of a microbatch.

    Routing is taken as balanced: each of the TP x EP ranks computes its share of the experts' products.
    With FP8 the products run at the FP8 peak, but their inputs are read and written once more to quantize
    them, so narrow matrices gain less.

    Args:
        scenario: the recipe's scenario.
        tokens: tokens of the microbatch on this rank, after CP has divided them.
        is_dense: a layer without experts.
    Returns: (seconds of the kernels, seconds of the collectives of TP, CP and EP).
    """
    setup = scenario.setup
    hardware = scenario.hardware
    eff = scenario.eff
    t = setup.layout.tensor
    attended = scenario.work.lengths.attended
    products, attention, experts = layer_flops(scenario.shape, attended, is_dense=is_dense)
    peak = hardware.fp8_flops if setup.fp8_training else hardware.bf16_flops  # FLOP/s
    seconds = tokens * products / t / (peak * eff.matrix)
    seconds += tokens * attention / t / (hardware.bf16_flops * eff.matrix)  # attention stays in BF16
    seconds += tokens * experts / t / (peak * eff.grouped)
    if setup.fp8_training:
        bandwidth = hardware.memory_bandwidth * eff.memory
        seconds += tokens * _quantized_bytes(scenario, is_dense) / bandwidth
    # Small microbatches wait for the CPU to launch their kernels.
    least_seconds = eff.expert_layer
    if is_dense:
        least_seconds = hardware.host_slowdown * eff.layer
    collectives = _collective_seconds(scenario, tokens, is_dense=is_dense)
    return max(seconds, least_seconds), collectives


def _quantized_bytes(scenario: Scenario, is_dense: bool) -> float:
    """Count the bytes per token that quantizing the inputs of a layer's products moves.

    Each number is read (2 bytes) and written twice, once transposed (1 byte each).
    """
    shape = scenario.shape
    t = scenario.setup.layout.tensor
    h = shape.hidden_size
    # Inputs of q, k, v and of the feed-forward layer are h wide; that of the output projection is q / t.
    if is_dense:
        width = 2 * h + (shape.query_size + (shape.dense_ffn_size or shape.ffn_size)) / t
    else:
        width = 2 * h + shape.query_size / t + shape.num_experts_per_token * (h + shape.ffn_size)
    return 4 * width


def _collective_seconds(scenario: Scenario, tokens: float, *, is_dense: bool) -> float:
    """Time the collectives of one layer's forward pass.

    TP: an all-gather and a reduce-scatter around attention and feed-forward (2205.05198, section 4.2.2). CP:
    the ring passes the keys and values of the other ranks. EP: tokens go to their experts and return.
    """
    shape = scenario.shape
    layout = scenario.setup.layout
    t = layout.tensor
    c = layout.context
    hidden_bytes = 2 * shape.hidden_size * tokens
    seconds = 4 * gather_seconds(scenario, hidden_bytes, t, t)
    if c > 1:
        key_value_bytes = 2 * 2 * shape.key_value_size / t * tokens * c
        seconds += gather_seconds(scenario, key_value_bytes, c, t * c)
    if not is_dense and layout.expert > 1:
        routed_bytes = shape.num_experts_per_token * hidden_bytes / memory.sequence_split(scenario.setup)
        seconds += 2 * exchange_seconds(scenario, routed_bytes, layout.expert, layout.expert_tensor)
    return seconds


def head_seconds(scenario: Scenario, tokens: float) -> float:
    """Time the last stage's logits and logprobs: the product, then three passes over FP32 logits."""
    shape = scenario.shape
    hardware = scenario.hardware
    eff = scenario.eff
    logits_per_token = shape.vocab_size / scenario.setup.layout.tensor
    product = 2 * tokens * logits_per_token * shape.hidden_size / (hardware.bf16_flops * eff.matrix)
    passes = 3 * 4 * tokens * logits_per_token / (hardware.memory_bandwidth * eff.memory)
    return product + passes


def stage_seconds(scenario: Scenario, tokens: float) -> float:
    """Time the slowest stage's forward pass over one microbatch."""
    shape = scenario.shape
    layout = scenario.setup.layout
    has_dense_layers = shape.num_dense_layers or not shape.num_experts
    dense = sum(layer_seconds(scenario, tokens, is_dense=True)) if has_dense_layers else 0.0
    sparse = sum(layer_seconds(scenario, tokens, is_dense=False)) if shape.num_experts else 0.0
    slowest = 0.0
    for stage, num_layers in enumerate(layout.stage_layers(shape.num_layers)):
        # `dense_layers` counts layers without experts in a model that has experts in the others.
        num_dense = dense_layers(shape, layout, stage) if shape.num_experts else num_layers
        seconds = num_dense * dense + (num_layers - num_dense) * sparse
        if stage == layout.pipeline - 1:
            seconds += head_seconds(scenario, tokens)
        slowest = max(slowest, seconds)
    return slowest


def bubble(num_stages: int, num_microbatches: int) -> float:
    """Compute the factor by which the pipeline's bubble lengthens a stage's time: (m + p - 1) / m."""
    return (num_microbatches + num_stages - 1) / num_microbatches


def scoring_seconds(scenario: Scenario) -> float:
    """Time one forward pass over all of the step's sequences."""
    layout = scenario.setup.layout
    num_microbatches, tokens = microbatches(scenario, scenario.setup.score_tokens)
    # `microbatches` counts those of one update; scoring passes over the whole step.
    num_microbatches *= scenario.work.num_updates
    waiting = bubble(layout.pipeline, num_microbatches)
    return num_microbatches * waiting * stage_seconds(scenario, tokens / layout.context)


def update_seconds(scenario: Scenario) -> dict[str, float]:
    """Time all updates of a step: forward and backward, the pipeline's bubble, gradients, the optimizer.

    The backward pass counts as two forward passes, full recomputation as another; selective recomputation is
    neglected. The reduce-scatter of the gradients and the all-gather of the parameters overlap with the last
    microbatch's backward pass and the next update's first forward pass.
    """
    setup = scenario.setup
    layout = setup.layout
    num_updates = scenario.work.num_updates
    num_microbatches, tokens = microbatches(scenario, setup.train_tokens)
    forward = stage_seconds(scenario, tokens / layout.context)
    num_passes = 4 if "full" in setup.recompute else 3
    busy = num_microbatches * num_passes * forward
    waiting = busy * (bubble(layout.pipeline, num_microbatches) - 1)
    stage = memory.heaviest_stage(scenario.shape, setup)
    # The time of the collectives that one microbatch's passes do not hide.
    exposed = max(_gradient_seconds(scenario, stage) - num_passes * forward, 0.0)
    return {
        "forward and backward": num_updates * busy,
        "pipeline bubble": num_updates * waiting,
        "gradients": num_updates * exposed,
        "optimizer": num_updates * _optimizer_seconds(scenario, stage),
    }


def _gradient_seconds(scenario: Scenario, stage: int) -> float:
    """Time the reduce-scatter of the gradients and the all-gather of BF16 parameters over their shards."""
    setup = scenario.setup
    counts = memory.trained_counts(scenario.shape, setup, stage)
    bytes_per_parameter = setup.grad_bytes + 2
    # Ranks of one stage are numbered consecutively: PP is outermost.
    span = setup.world_size // setup.layout.pipeline
    dense = gather_seconds(scenario, bytes_per_parameter * counts.dense, setup.shards, span)
    expert = gather_seconds(scenario, bytes_per_parameter * counts.expert, setup.expert_shards, span)
    return dense + expert


def _optimizer_seconds(scenario: Scenario, stage: int) -> float:
    """Time Adam, which reads and writes its state and reads the gradients.

    The offloaded share of these bytes passes the host's bus instead of HBM.
    """
    setup = scenario.setup
    hardware = scenario.hardware
    eff = scenario.eff
    counts = memory.trained_counts(scenario.shape, setup, stage)
    dense_shards, expert_shards = memory.optimizer_shards(setup)
    num_parameters = counts.dense / dense_shards + counts.expert / expert_shards
    bytes_per_parameter = 2 * memory.optimizer_bytes_per_parameter(setup) + setup.grad_bytes
    num_bytes = bytes_per_parameter * num_parameters
    on_gpu = num_bytes * (1 - setup.offload_fraction) / (hardware.memory_bandwidth * eff.memory)
    on_host = num_bytes * setup.offload_fraction / (hardware.host_bandwidth * eff.link)
    return on_gpu + on_host


def swap_seconds(scenario: Scenario, *, reference: bool) -> float:
    """Time the moves between a GPU and the host's memory per step.

    If rollouts share the training GPUs, the optimizer state goes out and comes back. To score with the
    reference policy, its weights come in, and the policy's come back afterwards.
    """
    shape = scenario.shape
    setup = scenario.setup
    stage = memory.heaviest_stage(shape, setup)
    state = 0.0
    if not setup.num_rollout_gpus:
        state = 2.0 * memory.optimizer_bytes(shape, setup, stage)
    weights = 0
    if reference:
        bf16_weights = 2 * stage_counts(shape, setup.layout, stage).total
        weights = 2 * bf16_weights
    return (state + weights) / (scenario.hardware.host_bandwidth * scenario.eff.link)
