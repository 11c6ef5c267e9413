"""Seconds of a rollout with vLLM: prefill, decoding, and the tail of the longest responses.

A decoding pass reads the weights and every cached key and value once, and computes one token of each
sequence (Pope et al., 2211.05102, section 3): time = max(weights / bandwidth, products / peak) + cache /
bandwidth + two all-reduces per layer + a fixed time. Passes are summed while responses end one by one.

With k drafts a pass computes k + 1 tokens of each sequence, and keeps (1 - a^(k+1)) / (1 - a) of them if a
draft is accepted with probability a (Leviathan et al., 2211.17192, equation 1).
"""

from collections.abc import Callable
from dataclasses import dataclass

from nemo_grpo.plan import memory
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

    Attributes: layers: per GPU.  dense, expert: bytes of a layer's weights that every token reads, and of all
                its experts.  head: bytes of the output matrix.
                products, head_products: FLOPs of one token in a layer, and in the output matrix.
                cache: bytes of the KV cache per token and layer.  flops: peak FLOP/s of the products.
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
        setup, eff = self.scenario.setup, self.scenario.eff
        fixed = eff.decode * self.scenario.hardware.host_slowdown * (EAGER if setup.vllm_eager else 1.0)
        drafts = setup.draft_tokens
        seconds = self._pass(self.layers, active, 1 + drafts, context) + fixed
        if drafts and setup.draft_layers:
            seconds += drafts * (self._pass(setup.draft_layers, active, 1, context) + DRAFT * fixed)
        return seconds / kept_tokens(drafts, self.scenario.work.acceptance)

    def _pass(self, layers: float, active: float, tokens: int, context: float) -> float:
        """Compute seconds of ``tokens`` tokens of each sequence through layers and output matrix.

        An expert is read if at least one token chose it: E (1 - (1 - k / E)^n) with n independent tokens.
        Tokens of one problem are not independent: n is 1 + routes x (tokens - 1).
        """
        shape, hardware, eff = self.scenario.shape, self.scenario.hardware, self.scenario.eff
        batch, bandwidth = active * tokens, hardware.memory_bandwidth * eff.memory
        independent = 1 + eff.routes * (batch - 1)
        share = shape.num_experts_per_token / shape.num_experts if shape.num_experts else 0.0
        touched = 1 - (1 - share) ** independent
        read = (layers * (self.dense + touched * self.expert) + self.head) / bandwidth
        computed = batch * (layers * self.products + self.head_products) / (self.flops * eff.matrix)
        attended = active * context * layers * self.cache / bandwidth
        reduced = reduce_seconds(
            self.scenario, batch * 2 * shape.hidden_size, self.scenario.setup.vllm_tensor
        )
        return max(read, computed) + attended + 2 * layers * reduced

    def prefill(self, tokens: float) -> float:
        """Compute seconds of a prompt's tokens."""
        products = self.layers * self.products + self.head_products
        return tokens * products / (self.flops * self.scenario.eff.matrix)


def kept_tokens(drafts: int, acceptance: float) -> float:
    """Compute the tokens that a pass yields on average: 1 + a + ... + a^k."""
    return float(sum(acceptance**position for position in range(drafts + 1)))


def engine_of(scenario: Scenario) -> Engine:
    """Describe the vLLM engine of a layout.

    MX formats are computed natively from Blackwell on; older GPUs widen their weights to BF16.
    """
    shape, setup, hardware = scenario.shape, scenario.setup, scenario.hardware
    attention, feed_forward, _ = memory.rollout_layer_sizes(shape, setup)
    dense, expert = memory.rollout_layer_bytes(shape, setup)
    layers = shape.num_layers / setup.vllm_pipeline
    sparse = shape.num_sparse_layers / shape.num_layers
    head = shape.vocab_size * shape.hidden_size / setup.vllm_tensor
    chosen = sparse * shape.num_experts_per_token * 3 * shape.hidden_size * shape.ffn_size
    in_fp8 = setup.vllm_fp8 and (hardware.compute_capability >= 10 or not setup.vllm_mx)
    flops = hardware.fp8_flops if in_fp8 else hardware.bf16_flops
    slower = flops / hardware.bf16_flops if setup.vllm_bf16_attention else 1.0
    return Engine(
        scenario=scenario,
        layers=layers,
        dense=dense,
        expert=sparse * shape.num_experts * expert,
        head=2 * head,
        products=2 * (slower * attention + feed_forward + chosen / setup.vllm_tensor),
        head_products=2 * head,
        cache=memory.cache_bytes_per_token(shape, setup) / layers,
        flops=flops,
    )


def num_engines(setup: PlanInput) -> int:
    """Count the engines that sample in parallel."""
    gpus = setup.num_rollout_gpus or setup.num_nodes * setup.gpus_per_node
    return max(gpus // (setup.vllm_tensor * setup.vllm_pipeline), 1)


def concurrency(scenario: Scenario) -> int:
    """Count sequences that an engine decodes at once: its limit, or those of mean length in its cache."""
    shape, setup = scenario.shape, scenario.setup
    room = memory.cache_bytes(shape, setup, int(scenario.hardware.memory_bytes))
    held = int(room / (memory.cache_bytes_per_token(shape, setup) * scenario.work.lengths.mean_sequence))
    return max(min(held, setup.vllm_max_sequences), 1)


def rollout_seconds(scenario: Scenario) -> dict[str, float]:
    """Predict one step's rollout: prefill, decoding until half of the last responses have ended, the tail.

    While responses wait for a place, all places are taken; then the last ones run out, and the step ends with
    the longest.
    """
    engine, work, lengths = engine_of(scenario), scenario.work, scenario.work.lengths
    waiting = -(-work.num_samples // num_engines(scenario.setup))
    places = min(waiting, concurrency(scenario))
    decode = (waiting - places) * _seconds_per_response(engine, places)
    first, tail = _drained(places, lengths, lengths.longest(work.num_samples), engine.iteration)
    decode += first
    prefill = _prefill_seconds(engine, waiting)
    scale = work.num_draws * scenario.setup.vllm_pipeline
    return {"prefill": scale * prefill, "decode": scale * decode, "tail": scale * tail}


def _drained(
    places: int, lengths: Lengths, longest: float, iteration: Callable[[float, float], float]
) -> tuple[float, float]:
    """Compute seconds of decoding ``places`` responses together: until half have ended, and the rest.

    Args: longest: tokens of the last one.  iteration: (active responses, tokens that each holds) -> seconds.
    """
    ends = [*lengths.responses[:-1], longest]
    halves, position = [0.0, 0.0], 0.0
    for index, end in enumerate(ends):
        active = max(places * (len(ends) - index) / len(ends), 1.0)
        seconds = (end - position) * iteration(active, lengths.prompt + (position + end) / 2)
        halves[2 * index >= len(ends)] += seconds
        position = end
    return halves[0], halves[1]


def steady_seconds(scenario: Scenario) -> float:
    """Predict seconds per step of engines that never run out of responses, so that there is no tail."""
    engine, work = engine_of(scenario), scenario.work
    per_step = -(-work.num_samples // num_engines(scenario.setup))
    places = min(per_step * max(work.trajectory_age, 1), concurrency(scenario))
    seconds = per_step * _seconds_per_response(engine, places) + _prefill_seconds(engine, per_step)
    return work.num_draws * scenario.setup.vllm_pipeline * seconds


def _seconds_per_response(engine: Engine, places: int) -> float:
    """Compute seconds per response of an engine whose places are all taken, by responses half done."""
    lengths = engine.scenario.work.lengths
    return lengths.mean / places * engine.iteration(places, lengths.prompt + lengths.mean / 2)


def _prefill_seconds(engine: Engine, num_responses: int) -> float:
    """Count a prompt once per group: the prefix cache serves its other responses."""
    work = engine.scenario.work
    return engine.prefill(-(-num_responses // work.group_size) * work.lengths.prompt)
