"""A timed scenario, and its collectives by the ring's volume: a rank sends (n - 1) / n of the whole.

Chan et al., "Collective communication: theory, practice, and experience" (2007), large messages; the least
time is fitted. Ranks are numbered as megatron-core does: TP innermost, then CP, EP, DP, PP.
"""

from dataclasses import dataclass

from nemo_grpo.models import ModelSpec
from nemo_grpo.plan.efficiency import FITTED, Efficiency
from nemo_grpo.plan.hardware import Hardware
from nemo_grpo.plan.inputs import PlanInput
from nemo_grpo.plan.workload import Workload


@dataclass(frozen=True)
class Scenario:
    """A model, its layout, what a step of it computes, the GPUs, and what of their peaks is reached."""

    shape: ModelSpec
    setup: PlanInput
    work: Workload
    hardware: Hardware
    eff: Efficiency = FITTED

    @property
    def domain(self) -> int:
        """GPUs that surely share NVLink.

        The GPU's whole domain if the job fits into one, or as many nodes as the recipe keeps together
        (cluster.segment_size); else a node's: which domain a node of the job is in is left to chance.
        """
        setup, whole = self.setup, self.hardware.nvlink_domain
        if setup.num_nodes * setup.gpus_per_node <= whole:
            return whole
        return min(max(setup.segment_nodes, 1) * setup.gpus_per_node, whole)


def gather_seconds(scenario: Scenario, num_bytes: float, ranks: int, span: int) -> float:
    """All-gather, or reduce-scatter, of num_bytes in all: (n - 1) / n bytes / bandwidth.

    Args: span: consecutive GPUs among which the ranks lie.
    """
    if ranks == 1:
        return 0.0
    hardware = scenario.hardware
    bandwidth = hardware.nvlink_bandwidth if span <= scenario.domain else hardware.network_bandwidth
    return num_bytes * (ranks - 1) / ranks / (bandwidth * scenario.eff.link)


def reduce_seconds(scenario: Scenario, num_bytes: float, ranks: int) -> float:
    """All-reduce of num_bytes over consecutive GPUs, with its least time.

    Inside a domain 2 (n - 1) / n bytes / NVLink; across domains each NVLink domain reduces first and every
    GPU exchanges its share over the network: + 2 (d - 1) / d bytes / (GPUs of a domain) / network.
    """
    if ranks == 1:
        return 0.0
    hardware, eff = scenario.hardware, scenario.eff
    near = min(ranks, scenario.domain)
    domains = -(-ranks // near)
    seconds = 2 * num_bytes * (near - 1) / near / (hardware.nvlink_bandwidth * eff.link)
    if domains == 1:
        return eff.hop + seconds
    far = 2 * num_bytes * (domains - 1) / domains / near / (hardware.network_bandwidth * eff.link)
    return eff.far_hop + seconds + far


def exchange_seconds(scenario: Scenario, num_bytes: float, ranks: int, stride: int) -> float:
    """All-to-all in which each rank sends num_bytes, evenly, to ranks ``stride`` GPUs apart.

    The share (n - local) / n goes over the network, (local - 1) / n over NVLink, at the same time.
    """
    hardware, eff = scenario.hardware, scenario.eff
    local = min(ranks, max(scenario.domain // stride, 1))
    far = num_bytes * (ranks - local) / ranks / (hardware.network_bandwidth * eff.link)
    near = num_bytes * (local - 1) / ranks / (hardware.nvlink_bandwidth * eff.link)
    return max(far, near)
