"""Inputs of the step-time formulas: the work of a step, the scenario, and times of its collectives.

A ring sends (n - 1) / n of the whole per rank (Chan et al., "Collective communication: theory, practice, and
experience", 2007, large messages); the least time is fitted. Ranks are numbered as megatron-core does: TP
innermost, then CP, EP, DP, PP.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from nemo_grpo.models import ModelSpec
from nemo_grpo.plan.hardware import FITTED, Efficiency, Hardware
from nemo_grpo.plan.inputs import PlanInput
from nemo_grpo.plan.lengths import Lengths

if TYPE_CHECKING:
    from nemo_grpo.recipe import Recipe


SIGNAL = 0.5
"""Share of groups whose rewards differ, if no run states it; it decides how often prompts are drawn again."""

ACCEPTANCE = 0.87
"""Probability that a drafted token is accepted after accepted ones, if no run states it.

SkyRL's MTP run of Qwen3.5-9B has 0.886, 0.869 and 0.861 at its three depths
(docs/examples/spec_decode.mdx)."""


@dataclass(frozen=True)
class Workload:
    """Work of one step, and of the run around it.

    Attributes:
        num_samples: responses trained per step.
        group_size: responses that share a prompt.
        num_updates: optimizer updates per step.
        lengths: lengths of prompts and responses.
        scoring_passes: forward passes over the step before its updates.
        num_draws: mean number of draws of num_samples responses for one step.
        trajectory_age: steps that rollouts may run ahead of training; 0: they alternate.
        waits_for_rollouts: True: the engines get new weights only after all running responses have ended.
        acceptance: probability of a drafted token whose predecessors were accepted.
        num_steps: steps of the run.
        or_passes: see `Recipe.or_passes`.
        val_period: steps between validations; 0: none.
        val_samples: responses of one validation.
        save_period: steps between checkpoints; 0: none.
        saves_optimizer: checkpoints contain the optimizer state.
    """

    num_samples: int
    group_size: int
    num_updates: int
    lengths: Lengths
    scoring_passes: int
    num_draws: float = 1.0
    trajectory_age: int = 0
    waits_for_rollouts: bool = False
    acceptance: float = ACCEPTANCE
    num_steps: int = 1
    or_passes: str = ""
    val_period: int = 0
    val_samples: int = 0
    save_period: int = 0
    saves_optimizer: bool = True

    @property
    def tokens(self) -> float:
        """Tokens of the step's prompts and responses."""
        return self.num_samples * self.lengths.mean_sequence


def workload_of(
    recipe: Recipe, lengths: Lengths, signal: float = SIGNAL, acceptance: float = ACCEPTANCE
) -> Workload:
    """Extract the work of a recipe's step.

    Args:
        recipe: the recipe.
        lengths: of its prompts and responses.
        signal: share of groups whose rewards differ.
        acceptance: probability of a drafted token whose predecessors were accepted.
    """
    grpo = recipe.grpo
    num_draws = 1.0
    if grpo.use_dynamic_sampling:
        threshold, max_draws = recipe.loss_fn.resampling(grpo.dynamic_sampling_max_gen_batches)
        num_draws = expected_draws(signal, threshold, max_draws, grpo.num_prompts_per_step)
    updates_in_flight = False
    if grpo.async_grpo is not None and recipe.policy.generation.vllm_cfg.async_engine:
        updates_in_flight = bool(grpo.async_grpo.in_flight_weight_updates)
    return Workload(
        num_samples=recipe.num_sequences_per_step,
        group_size=grpo.num_generations_per_prompt,
        num_updates=max(recipe.num_updates_per_step, 1),
        lengths=lengths,
        scoring_passes=scoring_passes(recipe),
        num_draws=num_draws,
        trajectory_age=recipe.rollouts_ahead,
        waits_for_rollouts=not (updates_in_flight or recipe.has_single_controller),
        acceptance=acceptance,
        num_steps=grpo.max_num_steps,
        or_passes=recipe.or_passes,
        val_period=max(grpo.val_period, 0),
        val_samples=(grpo.max_val_samples or 0) * grpo.val_num_generations_per_prompt,
        save_period=recipe.checkpointing.save_period if recipe.checkpointing.enabled else 0,
        saves_optimizer=recipe.checkpointing.save_optimizer,
    )


def scoring_passes(recipe: Recipe) -> int:
    """Count forward passes over a step before its updates.

    One for the policy's logprobs and entropies, one for the reference policy's if the variant compares with
    it. NeMo-RL skips the first with force_on_policy_ratio, unless it masks sequences by logprob error.
    """
    return int(recipe.policy_is_scored) + int(recipe.loss_fn.needs_reference)


def expected_draws(signal: float, threshold: float, max_draws: int, num_groups: int) -> float:
    """Compute the expected draws of num_groups prompts until threshold x num_groups groups carry signal.

    Implements the expectation of `core.resampling.accumulate_groups`: after n draws the number of groups
    with signal is binomial(n B, p), so E[draws] = 1 + sum_n P(fewer than the threshold after n draws). The
    binomial is approximated by a normal distribution with a continuity correction.
    """
    from statistics import NormalDist

    required = threshold * num_groups
    expected = 1.0
    for num_draws in range(1, max_draws):
        mean = num_draws * num_groups * signal
        std = (mean * (1 - signal)) ** 0.5
        if std:
            too_few = NormalDist(mean, std).cdf(required - 0.5)
        else:  # every group has signal, or none
            too_few = float(mean < required)
        expected += too_few
        if too_few < 1e-6:
            break
    return expected


@dataclass(frozen=True)
class Scenario:
    """Input of all step-time formulas: model, layout, work of a step, GPUs, and fitted efficiencies."""

    shape: ModelSpec
    setup: PlanInput
    work: Workload
    hardware: Hardware
    eff: Efficiency = FITTED

    @property
    def domain(self) -> int:
        """GPUs that are certain to share NVLink.

        If the job fits into one NVLink domain, these are all GPUs of the domain. Otherwise they are those of
        the nodes that the recipe keeps together (cluster.segment_size), or of a single node, because the
        scheduler may put each node into another domain.
        """
        setup = self.setup
        domain = self.hardware.nvlink_domain
        if setup.num_nodes * setup.gpus_per_node <= domain:
            return domain
        return min(max(setup.segment_nodes, 1) * setup.gpus_per_node, domain)


def gather_seconds(scenario: Scenario, num_bytes: float, ranks: int, span: int) -> float:
    """Time an all-gather or reduce-scatter: (n - 1) / n bytes / bandwidth.

    Args:
        scenario: the GPUs.
        num_bytes: bytes of the whole, over all ranks.
        ranks: n.
        span: consecutive GPUs among which the ranks lie.
    """
    if ranks == 1:
        return 0.0
    hardware = scenario.hardware
    bandwidth = hardware.nvlink_bandwidth if span <= scenario.domain else hardware.network_bandwidth
    return num_bytes * (ranks - 1) / ranks / (bandwidth * scenario.eff.link)


def reduce_seconds(scenario: Scenario, num_bytes: float, ranks: int) -> float:
    """Time an all-reduce of num_bytes over consecutive GPUs, with its least time.

    Inside a domain 2 (n - 1) / n bytes / NVLink; across domains each NVLink domain reduces first and every
    GPU exchanges its share over the network: + 2 (d - 1) / d bytes / (GPUs of a domain) / network.
    """
    if ranks == 1:
        return 0.0
    hardware = scenario.hardware
    eff = scenario.eff
    ranks_per_domain = min(ranks, scenario.domain)
    num_domains = ceil(ranks / ranks_per_domain)
    nvlink = hardware.nvlink_bandwidth * eff.link  # bytes/s
    network = hardware.network_bandwidth * eff.link
    inside = 2 * num_bytes * (ranks_per_domain - 1) / ranks_per_domain / nvlink
    if num_domains == 1:
        return eff.hop + inside
    across = 2 * num_bytes * (num_domains - 1) / num_domains / ranks_per_domain / network
    return eff.far_hop + inside + across


def exchange_seconds(scenario: Scenario, num_bytes: float, ranks: int, stride: int) -> float:
    """Time an all-to-all in which each rank sends num_bytes, evenly, to ranks ``stride`` GPUs apart.

    The share (n - local) / n goes over the network, (local - 1) / n over NVLink, at the same time.
    """
    hardware = scenario.hardware
    eff = scenario.eff
    num_local = min(ranks, max(scenario.domain // stride, 1))
    network = num_bytes * (ranks - num_local) / ranks / (hardware.network_bandwidth * eff.link)
    nvlink = num_bytes * (num_local - 1) / ranks / (hardware.nvlink_bandwidth * eff.link)
    return max(network, nvlink)
