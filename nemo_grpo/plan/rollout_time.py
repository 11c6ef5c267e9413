"""Seconds of a rollout with vLLM: prefill, decoding, and the tail of the longest responses.

A decoding iteration reads the weights and every cached key and value once, and computes one token of each
sequence (Pope et al., 2211.05102, section 3): time = max(weights / bandwidth, products / peak) + cache /
bandwidth + two all-reduces per layer + a fixed time. Iterations are summed while responses end one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nemo_grpo.plan import memory
from nemo_grpo.plan.case import Case
from nemo_grpo.plan.collectives import reduce_seconds
from nemo_grpo.plan.lengths import Lengths
from nemo_grpo.plan.setup import Setup

EAGER = 4.0
"""A decoding iteration's fixed time without CUDA graphs, in times of the one with them."""


@dataclass(frozen=True)
class Engine:
    """One vLLM engine of a case, in numbers per GPU.

    Attributes: dense, expert: bytes of weights that every token reads, and of all experts.
                num_experts, chosen: experts, and those of one token.
                token_flops: products of one token.  cache: bytes of one cached token.
                reduced: bytes per token of one all-reduce.  num_reduces: of an iteration.
    """

    case: Case
    dense: float
    expert: float
    num_experts: int
    chosen: int
    token_flops: float
    cache: float
    reduced: float
    num_reduces: int
    ranks: int
    flops: float
    is_eager: bool

    def iteration(self, active: float, context: float) -> float:
        """Seconds to decode one token of ``active`` sequences that hold ``context`` tokens each.

        Experts are read that at least one token chose: E (1 - (1 - k / E)^n) with n independent tokens.
        Tokens of one problem are not: n is 1 + routes x (active - 1).
        """
        hardware, eff = self.case.hardware, self.case.eff
        independent = 1 + eff.routes * (active - 1)
        touched = 1 - (1 - self.chosen / self.num_experts) ** independent if self.num_experts else 0.0
        bandwidth = hardware.memory_bandwidth * eff.memory
        read = (self.dense + touched * self.expert) / bandwidth
        computed = active * self.token_flops / (self.flops * eff.matrix)
        attended = active * context * self.cache / bandwidth
        talk = self.num_reduces * reduce_seconds(self.case, active * self.reduced, self.ranks)
        return max(read, computed) + attended + talk + eff.decode * (EAGER if self.is_eager else 1.0)


def engine_of(case: Case) -> Engine:
    """The vLLM engine of a layout."""
    shape, setup, hardware = case.shape, case.setup, case.hardware
    dense, expert = memory.rollout_layer_sizes(shape, setup)
    layers = shape.num_layers / setup.vllm_pipeline
    num_sparse = shape.num_sparse_layers / setup.vllm_pipeline
    head = shape.vocab_size * shape.hidden_size / setup.vllm_tensor
    width = 1 if setup.vllm_fp8 else 2
    chosen = num_sparse * shape.num_experts_per_token * 3 * shape.hidden_size * shape.ffn_size
    return Engine(
        case=case,
        dense=width * layers * dense + 2 * head,
        expert=width * num_sparse * shape.num_experts * expert,
        num_experts=shape.num_experts,
        chosen=shape.num_experts_per_token,
        token_flops=2 * (layers * dense + head + chosen / setup.vllm_tensor),
        cache=memory.cache_bytes_per_token(shape, setup),
        reduced=2 * shape.hidden_size,
        num_reduces=2 * shape.num_layers,
        ranks=setup.vllm_tensor,
        flops=hardware.fp8_flops if setup.vllm_fp8 else hardware.bf16_flops,
        is_eager=setup.vllm_eager,
    )


def num_engines(setup: Setup) -> int:
    """Engines that sample side by side."""
    gpus = setup.num_rollout_gpus or setup.num_nodes * setup.gpus_per_node
    return max(gpus // (setup.vllm_tensor * setup.vllm_pipeline), 1)


def concurrency(case: Case) -> int:
    """Sequences that an engine decodes at once: its limit, or what its cache holds of the mean length."""
    shape, setup = case.shape, case.setup
    room = memory.cache_bytes(shape, setup, int(case.hardware.memory_bytes))
    held = int(room / (memory.cache_bytes_per_token(shape, setup) * case.work.lengths.mean_sequence))
    return max(min(held, setup.vllm_max_sequences), 1)


def rollout_seconds(case: Case) -> dict[str, float]:
    """Seconds of one step's rollout: prefill, decoding until half of the responses have ended, and the tail.

    While responses wait for a place, places are always taken; then the last ones run out, and the step ends
    with the longest.
    """
    engine, work, lengths = engine_of(case), case.work, case.work.lengths
    waiting = -(-work.num_samples // num_engines(case.setup))
    places = min(waiting, concurrency(case))
    decode = (waiting - places) * _seconds_per_response(engine, places)
    first, tail = drained(places, lengths, lengths.longest(work.num_samples), engine.iteration)
    decode += first
    prefill = _prefill_seconds(engine, waiting)
    scale = work.num_draws * case.setup.vllm_pipeline
    return {"prefill": scale * prefill, "decode": scale * decode, "tail": scale * tail}


def drained(
    places: int, lengths: Lengths, longest: float, iteration: Callable[[float, float], float]
) -> tuple[float, float]:
    """Seconds of decoding ``places`` responses together: until half of them have ended, and the rest.

    Args: longest: the last one's tokens.  iteration: (active responses, tokens that each holds) -> seconds.
    """
    ends = [*lengths.responses[:-1], longest]
    halves, position = [0.0, 0.0], 0.0
    for index, end in enumerate(ends):
        active = max(places * (len(ends) - index) / len(ends), 1.0)
        seconds = (end - position) * iteration(active, lengths.prompt + (position + end) / 2)
        halves[2 * index >= len(ends)] += seconds
        position = end
    return halves[0], halves[1]


def steady_seconds(case: Case) -> float:
    """Seconds per step of engines that always have as many responses to decode as may run ahead: no tail."""
    engine, work = engine_of(case), case.work
    per_step = -(-work.num_samples // num_engines(case.setup))
    places = min(per_step * max(work.trajectory_age, 1), concurrency(case))
    seconds = per_step * _seconds_per_response(engine, places) + _prefill_seconds(engine, per_step)
    return work.num_draws * case.setup.vllm_pipeline * seconds


def _seconds_per_response(engine: Engine, places: int) -> float:
    """Of an engine whose places are all taken, by responses that are half done on average."""
    lengths = engine.case.work.lengths
    return lengths.mean / places * engine.iteration(places, lengths.prompt + lengths.mean / 2)


def _prefill_seconds(engine: Engine, num_responses: int) -> float:
    """Prompts are computed once per group: its other responses find them in the prefix cache."""
    work = engine.case.work
    prompts = -(-num_responses // work.group_size)
    return prompts * work.lengths.prompt * engine.token_flops / (engine.flops * engine.case.eff.matrix)
