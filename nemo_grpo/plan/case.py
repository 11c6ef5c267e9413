"""The case that is timed: the argument of each phase's formula."""

from dataclasses import dataclass

from nemo_grpo.families import ModelSpec
from nemo_grpo.plan.efficiency import FITTED, Efficiency
from nemo_grpo.plan.hardware import Hardware
from nemo_grpo.plan.setup import Setup
from nemo_grpo.plan.workload import Workload


@dataclass(frozen=True)
class Case:
    """A model, its layout, what a step of it computes, the GPUs, and what of their peaks is reached."""

    shape: ModelSpec
    setup: Setup
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

    @property
    def host(self) -> float:
        """Factor of the host's own work."""
        return self.hardware.host_slowdown
