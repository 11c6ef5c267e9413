"""What is timed, in one object: each formula of a phase takes it, and what its phase adds."""

from __future__ import annotations

from dataclasses import dataclass

from checkpoints_conv.families import ModelSpec
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
