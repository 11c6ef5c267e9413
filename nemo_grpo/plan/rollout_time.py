"""Seconds of a rollout with vLLM: prefill, decoding, and the tail of the longest responses.

A decoding pass reads the weights and every cached key and value once, and computes one token of each
sequence (Pope et al., 2211.05102, section 3): time = max(weights / bandwidth, products / peak) + cache /
bandwidth + two all-reduces per layer + a fixed time. Passes are summed while responses end one by one.

With k drafts a pass computes k + 1 tokens of each sequence, and keeps (1 - a^(k+1)) / (1 - a) of them if a
draft is accepted with probability a (Leviathan et al., 2211.17192, equation 1).
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from nemo_grpo.plan import rollout_memory
from nemo_grpo.plan.inputs import PlanInput
from nemo_grpo.plan.lengths import Lengths
from nemo_grpo.plan.scenario import Scenario, reduce_seconds

EAGER = 4.0
"""Fixed time of a decoding pass without CUDA graphs, relative to one with them."""
DRAFT = 0.22
"""Fixed time of a draft, relative to a pass; from SkyRL's pair of runs with and without three drafts."""


@dataclass(frozen=True)
class Engine:
    """One vLLM engine of a scenario, in numbers per GPU.

    Attributes:
        scenario: the step that it samples for.
        layers: layers per GPU; the mean over the stages of vLLM's pipeline.
        dense: bytes of a layer's weights that every token reads.
        expert: bytes of all experts of a layer.
        head: bytes of the output matrix.
        products: FLOPs of one token in a layer.
        head_products: FLOPs of one token in the output matrix.
        cache: bytes of the KV cache per token and layer.
        flops: peak FLOP/s of the products.
    """

    scenario: Scenario
    layers: float
    dense: float
    expert: float
    head: float
    products: float
    head_products: float
    cache: float
    flops: float

    def iteration(self, active: float, context: float) -> float:
        """Compute seconds per token of ``active`` sequences that hold ``context`` tokens each."""
        setup = self.scenario.setup
        # The CPU schedules, samples and launches; without CUDA graphs it launches every kernel.
        fixed = self.scenario.eff.decode * self.scenario.hardware.host_slowdown
        if setup.vllm_eager:
            fixed *= EAGER
        num_drafts = setup.draft_tokens
        seconds = self._pass(self.layers, active, 1 + num_drafts, context) + fixed
        if num_drafts and setup.draft_layers:
            # A draft model computes its tokens one after the other.
            draft = self._pass(setup.draft_layers, active, 1, context) + DRAFT * fixed
            seconds += num_drafts * draft
        return seconds / kept_tokens(num_drafts, self.scenario.work.acceptance)

    def _pass(self, layers: float, active: float, tokens: int, context: float) -> float:
        """Compute the seconds in which ``tokens`` tokens of each sequence pass layers and output matrix.

        An expert's weights are read if at least one token chose it. With n independent tokens these are
        E (1 - (1 - k / E)^n) experts. Tokens of one problem are not independent, so n is
        1 + routes x (tokens - 1).
        """
        shape = self.scenario.shape
        eff = self.scenario.eff
        num_tokens = active * tokens
        bandwidth = self.scenario.hardware.memory_bandwidth * eff.memory  # bytes/s
        # Share of the experts that the batch reads.
        num_independent = 1 + eff.routes * (num_tokens - 1)
        routed_share = shape.num_experts_per_token / shape.num_experts if shape.num_experts else 0.0
        read_share = 1 - (1 - routed_share) ** num_independent
        weight_bytes = layers * (self.dense + read_share * self.expert) + self.head
        flops = num_tokens * (layers * self.products + self.head_products)
        cache_bytes = active * context * layers * self.cache
        hidden_bytes = num_tokens * 2 * shape.hidden_size
        all_reduce = reduce_seconds(self.scenario, hidden_bytes, self.scenario.setup.vllm_tensor)
        products = max(weight_bytes / bandwidth, flops / (self.flops * eff.matrix))
        # Two all-reduces per layer: after attention and after the feed-forward layer.
        return products + cache_bytes / bandwidth + 2 * layers * all_reduce

    def prefill(self, tokens: float) -> float:
        """Compute seconds of the forward pass over this number of prompt tokens."""
        products = self.layers * self.products + self.head_products
        return tokens * products / (self.flops * self.scenario.eff.matrix)


def kept_tokens(drafts: int, acceptance: float) -> float:
    """Compute the tokens that a pass yields on average: 1 + a + ... + a^k."""
    return float(sum(acceptance**position for position in range(drafts + 1)))


def engine_of(scenario: Scenario) -> Engine:
    """Describe the vLLM engine of a layout.

    Blackwell and later GPUs compute MX formats natively. Older ones convert such weights to BF16 first.
    """
    shape = scenario.shape
    setup = scenario.setup
    hardware = scenario.hardware
    num_layers = shape.num_layers / setup.vllm_pipeline
    sparse_share = shape.num_sparse_layers / shape.num_layers
    attention, feed_forward, _ = rollout_memory.rollout_layer_sizes(shape, setup)
    dense_bytes, expert_bytes = rollout_memory.rollout_layer_bytes(shape, setup)
    experts_per_token = sparse_share * shape.num_experts_per_token
    routed = experts_per_token * 3 * shape.hidden_size * shape.ffn_size / setup.vllm_tensor
    output_matrix = shape.vocab_size * shape.hidden_size / setup.vllm_tensor
    computes_in_fp8 = setup.vllm_fp8 and (hardware.compute_capability >= 10 or not setup.vllm_mx)
    flops = hardware.fp8_flops if computes_in_fp8 else hardware.bf16_flops
    # An `Engine` has one peak for all products. Where attention stays in BF16 beside FP8, its products are
    # multiplied by the ratio of the two peaks.
    attention_factor = flops / hardware.bf16_flops if setup.vllm_bf16_attention else 1.0
    return Engine(
        scenario=scenario,
        layers=num_layers,
        dense=dense_bytes,
        expert=sparse_share * shape.num_experts * expert_bytes,
        head=2 * output_matrix,
        products=2 * (attention_factor * attention + feed_forward + routed),
        head_products=2 * output_matrix,
        cache=rollout_memory.cache_bytes_per_token(shape, setup) / num_layers,
        flops=flops,
    )


def num_engines(setup: PlanInput) -> int:
    """Count the engines that sample in parallel."""
    num_gpus = setup.num_rollout_gpus
    if num_gpus == 0:  # rollouts share the GPUs that train
        num_gpus = setup.num_nodes * setup.gpus_per_node
    return max(num_gpus // (setup.vllm_tensor * setup.vllm_pipeline), 1)


def concurrency(scenario: Scenario) -> int:
    """Count the sequences that an engine decodes at once.

    That is vLLM's limit, or fewer if its cache holds fewer sequences of mean length.
    """
    shape = scenario.shape
    setup = scenario.setup
    cache_bytes = rollout_memory.cache_bytes(shape, setup, int(scenario.hardware.memory_bytes))
    bytes_per_token = rollout_memory.cache_bytes_per_token(shape, setup)
    bytes_per_sequence = bytes_per_token * scenario.work.lengths.mean_sequence
    num_cached = int(cache_bytes / bytes_per_sequence)
    return max(min(num_cached, setup.vllm_max_sequences), 1)


def rollout_seconds(scenario: Scenario) -> dict[str, float]:
    """Predict the seconds of one step's rollout: prefill, decode and tail.

    An engine decodes a limited number of responses at once. While others wait, it is full. Then the last ones
    run out: "decode" ends when half of these have ended, and "tail" with the longest.
    """
    engine = engine_of(scenario)
    work = scenario.work
    lengths = work.lengths
    num_responses = ceil(work.num_samples / num_engines(scenario.setup))
    num_at_once = min(num_responses, concurrency(scenario))
    # The engine is full until only `num_at_once` responses are left.
    full = (num_responses - num_at_once) * _seconds_per_response(engine, num_at_once)
    first_half, tail = _drained(num_at_once, lengths, lengths.longest(work.num_samples), engine.iteration)
    decode = full + first_half
    prefill = _prefill_seconds(engine, num_responses)
    # A batch passes the stages of vLLM's pipeline one after the other.
    scale = work.num_draws * scenario.setup.vllm_pipeline
    return {"prefill": scale * prefill, "decode": scale * decode, "tail": scale * tail}


def _drained(
    num_responses: int, lengths: Lengths, longest: float, iteration: Callable[[float, float], float]
) -> tuple[float, float]:
    """Time the decoding of responses that start together, with no others to follow.

    Args:
        num_responses: responses at the start.
        lengths: lengths of prompts and responses.
        longest: tokens of the longest response.
        iteration: (active responses, tokens that each holds) -> seconds per token.
    Returns: seconds until half of the responses have ended, and seconds from then until all have.
    """
    ends = [*lengths.responses[:-1], longest]
    first_half = 0.0
    tail = 0.0
    position = 0.0  # tokens that all active responses have
    for index, end in enumerate(ends):
        active = max(num_responses * (len(ends) - index) / len(ends), 1.0)
        context = lengths.prompt + (position + end) / 2
        seconds = (end - position) * iteration(active, context)
        if 2 * index < len(ends):
            first_half += seconds
        else:
            tail += seconds
        position = end
    return first_half, tail


def steady_seconds(scenario: Scenario) -> float:
    """Predict the seconds per step of engines that always have further responses to decode, so no tail."""
    engine = engine_of(scenario)
    work = scenario.work
    num_responses = ceil(work.num_samples / num_engines(scenario.setup))
    # If rollouts may run A steps ahead, responses of A steps are there to be decoded at once.
    num_available = num_responses * max(work.trajectory_age, 1)
    num_at_once = min(num_available, concurrency(scenario))
    decode = num_responses * _seconds_per_response(engine, num_at_once)
    seconds = decode + _prefill_seconds(engine, num_responses)
    return work.num_draws * scenario.setup.vllm_pipeline * seconds


def _seconds_per_response(engine: Engine, num_at_once: int) -> float:
    """Compute the seconds per response of an engine that always decodes ``num_at_once`` responses."""
    lengths = engine.scenario.work.lengths
    # On average these responses are half done.
    context = lengths.prompt + lengths.mean / 2
    return lengths.mean / num_at_once * engine.iteration(num_at_once, context)


def _prefill_seconds(engine: Engine, num_responses: int) -> float:
    """Time the prefill of an engine's prompts, each once per group: later responses find it in the cache."""
    work = engine.scenario.work
    num_prompts = ceil(num_responses / work.group_size)
    return engine.prefill(num_prompts * work.lengths.prompt)
