"""Time of one step, phase by phase, and the throughput and MFU that follow from it."""

from dataclasses import dataclass, replace
from functools import lru_cache

from nemo_grpo.models import ModelSpec
from nemo_grpo.plan.inputs import PlanInput
from nemo_grpo.plan.parameters import model_parameters
from nemo_grpo.plan.rollout_time import rollout_seconds, steady_seconds
from nemo_grpo.plan.scenario import Scenario
from nemo_grpo.plan.training_time import model_flops, scoring_seconds, swap_seconds, update_seconds
from nemo_grpo.recipe.layout import Layout

STORAGE = 2e9
"""Bytes/s that one node writes to shared storage; an assumption, not fitted."""
ROUTES = 1e9
"""Bytes/s at which one process packs and unpacks routing; an assumption, not fitted."""


@dataclass(frozen=True)
class StepTime:
    """One step of a scenario.

    Attributes:
        scenario: model, layout, work and GPUs.
        phases: name -> seconds. The phases follow each other; if rollouts run ahead, the phases `ROLLOUT`
            overlap with the others.
        steady: seconds per step of engines that always have further responses to decode, refit included.
        validation: seconds of one validation.
        checkpoint: seconds of one checkpoint.
    """

    scenario: Scenario
    phases: dict[str, float]
    steady: float
    validation: float
    checkpoint: float

    @property
    def age(self) -> int:
        """Steps that rollouts may run ahead of training."""
        return self.scenario.work.trajectory_age

    @property
    def num_gpus(self) -> int:
        """GPUs of the job."""
        return self.scenario.setup.num_nodes * self.scenario.setup.gpus_per_node

    @property
    def rollout(self) -> float:
        """Seconds of the rollout's phases."""
        return sum(self.phases[name] for name in ROLLOUT)

    @property
    def training(self) -> float:
        """Seconds of all other phases."""
        return sum(self.phases.values()) - self.rollout

    @property
    def seconds(self) -> float:
        """Seconds of the step.

        If rollouts and training alternate, this is the sum of all phases. If rollouts run A steps ahead, it
        is the longest of three times:

        - training, refit included;
        - the rollout of engines that never wait (`steady`);
        - (rollout + training) / (A + 1). Responses for step n + A start with the weights of step n, so one
          rollout and one update must pass within A + 1 steps (NeMo-RL's replay buffer,
          algorithms/async_utils).

        If responses must end before a refit (NeMo-RL without in_flight_weight_updates), rollout and training
        both start after one refit and end before the next, for any A.
        """
        in_turn = self.rollout + self.training
        if self.age == 0:
            return in_turn
        if self.scenario.work.waits_for_rollouts:
            refit = self.phases["refit"]
            return max(self.rollout, self.training - refit) + refit
        return max(self.training, self.steady, in_turn / (self.age + 1))

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Tokens of prompts and trained responses, over all GPUs, as NeMo-RL counts."""
        return self.scenario.work.tokens / self.seconds / self.num_gpus

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization of the update: its FLOPs / (its seconds x BF16 peak of the training GPUs).

        Its FLOPs are those of three forward passes, recomputation not counted.
        """
        scenario = self.scenario
        seconds = sum(self.phases[name] for name in UPDATE)
        flops_per_token = model_flops(scenario.shape, scenario.work.lengths.attended)
        flops = 3 * scenario.work.tokens * flops_per_token
        return flops / (seconds * scenario.hardware.bf16_flops * scenario.setup.world_size)


ROLLOUT = ("prefill", "decode", "tail")
"""Phases of the engines that sample."""
UPDATE = ("forward and backward", "pipeline bubble", "gradients", "optimizer")
"""Phases of the updates."""


def step_time(scenario: Scenario) -> StepTime:
    """Predict the time of one step of a cluster recipe.

    The formulas stand in the modules of their phases. Rewards, data and logs take a fixed time per step and
    another one per response.
    """
    setup = scenario.setup
    work = scenario.work
    rollout, steady, validation = _rollout(replace(scenario, setup=_without_training_layout(setup)))
    phases = dict(rollout)  # a copy: `_rollout` returns the same dict for the next layout
    phases["scoring"] = work.scoring_passes * scoring_seconds(scenario)
    phases |= update_seconds(scenario)
    phases["refit"] = refit_seconds(scenario)
    phases["swaps to the host"] = swap_seconds(scenario, reference=work.scoring_passes > 1)
    routes = route_seconds(scenario) if setup.replays_routes else 0.0
    host = scenario.eff.step + scenario.eff.sample * work.num_samples * work.num_draws
    phases["rewards, data, logs"] = routes + scenario.hardware.host_slowdown * host
    checkpoint = checkpoint_seconds(scenario.shape, setup, saves_optimizer=work.saves_optimizer)
    return StepTime(scenario, phases, steady + phases["refit"], validation, checkpoint)


def _without_training_layout(setup: PlanInput) -> PlanInput:
    """Reset the training layout, so that a search computes each kind of rollout once."""
    return replace(setup, layout=Layout(), recompute=(), train_tokens=1, score_tokens=1, num_microbatches=1)


@lru_cache(maxsize=256)
def _rollout(scenario: Scenario) -> tuple[dict[str, float], float, float]:
    return rollout_seconds(scenario), steady_seconds(scenario), validation_seconds(scenario)


def validation_seconds(scenario: Scenario) -> float:
    """Predict the seconds of a validation, which is a rollout of its samples."""
    work = scenario.work
    if not work.val_samples:
        return 0.0
    samples = replace(work, num_samples=work.val_samples, group_size=1, num_draws=1.0, trajectory_age=0)
    return sum(rollout_seconds(replace(scenario, work=samples)).values())


def num_tensors(shape: ModelSpec) -> int:
    """Count the tensors of the Hugging Face model.

    They are 3 outside the layers, 9 per dense layer, and 6 + 3 per expert in a sparse layer.
    """
    per_sparse = 6 + 3 * (shape.num_experts + shape.num_shared_experts)
    return 3 + 9 * (shape.num_layers - shape.num_sparse_layers) + per_sparse * shape.num_sparse_layers


def refit_seconds(scenario: Scenario) -> float:
    """Predict the seconds of the refit, in which NeMo-RL gathers each Hugging Face tensor for the engines.

    The weights, 2 bytes per parameter, go over the network if ranks of several NVLink domains share the model
    or if rollouts have GPUs of their own. They go over NVLink if one domain holds the model, and nowhere if
    each GPU holds all of it.

    Engines on the training GPUs load each tensor on arrival, and are put to sleep and woken. Engines on other
    GPUs load one packed buffer while the next is on its way (nemo_rl/utils/packed_tensor.py).
    """
    hardware = scenario.hardware
    eff = scenario.eff
    layout = scenario.setup.layout
    has_rollout_gpus = scenario.setup.num_rollout_gpus > 0
    num_bytes = 2 * model_parameters(scenario.shape)
    num_sharing = max(layout.tensor * layout.expert_tensor, layout.expert) * layout.pipeline
    if has_rollout_gpus or num_sharing > scenario.domain:
        moving = num_bytes / (hardware.network_bandwidth * eff.link)
    elif num_sharing > 1:
        moving = num_bytes / (hardware.nvlink_bandwidth * eff.link)
    else:
        moving = 0.0
    loading = num_tensors(scenario.shape) * eff.tensor
    if has_rollout_gpus:
        return max(loading, moving)
    return eff.refit + loading + moving


def route_seconds(scenario: Scenario) -> float:
    """Predict the seconds of router replay, which copies each token's experts in each sparse layer.

    An expert's number has 1 byte up to 128 experts and 2 above (nemo_rl/models/generation/interfaces.py). The
    numbers go from the engines through Ray's object store to the driver, and from there to the ranks that
    train.
    """
    shape = scenario.shape
    bytes_per_expert = 1 if shape.num_experts <= 128 else 2
    experts_per_token = shape.num_sparse_layers * shape.num_experts_per_token
    num_bytes = scenario.work.tokens * experts_per_token * bytes_per_expert
    # They are packed once for the way to the driver, and once for the way to the ranks.
    return 2 * num_bytes / ROUTES


def checkpoint_seconds(shape: ModelSpec, setup: PlanInput, *, saves_optimizer: bool) -> float:
    """Predict the seconds of a checkpoint: 2 bytes per parameter and 12 of its optimizer state."""
    bytes_per_parameter = 14 if saves_optimizer else 2
    num_bytes = model_parameters(shape) * bytes_per_parameter
    num_nodes = max(setup.world_size // setup.gpus_per_node, 1)
    return num_bytes / (STORAGE * num_nodes)
