"""Seconds in which weights move: to the rollout engines after an update, and to disk at a checkpoint."""

from nemo_grpo.families import ModelSpec
from nemo_grpo.plan.case import Case
from nemo_grpo.plan.parameters import model_parameters
from nemo_grpo.plan.setup import Setup

STORAGE = 2e9
"""Bytes/s that one node writes to shared storage; an assumption, not fitted."""
ROUTES = 1e9
"""Bytes/s at which one process packs and unpacks routing; an assumption, not fitted: no run states it."""


def num_tensors(shape: ModelSpec) -> int:
    """Tensors of the Hugging Face model: 9 per dense layer, 6 and 3 per expert with experts, and 3."""
    per_sparse = 6 + 3 * (shape.num_experts + shape.num_shared_experts)
    return 3 + 9 * (shape.num_layers - shape.num_sparse_layers) + per_sparse * shape.num_sparse_layers


def refit_seconds(case: Case) -> float:
    """NeMo-RL gathers each tensor of the Hugging Face model on every rank and hands it to the engine there.

    2 x parameters over the network where ranks of several NVLink domains share the model or rollouts have
    GPUs of their own, over NVLink where one domain holds it, and nothing where each GPU holds all of it.
    Engines that share the GPUs load each tensor when it has come, and are put to sleep and woken besides;
    those on other GPUs load one packed buffer while the next is on its way (nemo_rl/utils/packed_tensor.py).
    """
    shape, setup, hardware, eff = case.shape, case.setup, case.hardware, case.eff
    layout, num_bytes = setup.layout, 2 * model_parameters(shape)
    shared = max(layout.tensor * layout.expert_tensor, layout.expert) * layout.pipeline
    if setup.num_rollout_gpus or shared > case.domain:
        moved = num_bytes / (hardware.network_bandwidth * eff.link)
    else:
        moved = num_bytes / (hardware.nvlink_bandwidth * eff.link) if shared > 1 else 0.0
    loaded = num_tensors(shape) * eff.tensor
    return max(loaded, moved) if setup.num_rollout_gpus else eff.refit + loaded + moved


def route_seconds(case: Case) -> float:
    """Router replay: the K experts that each token chose in each sparse layer, at `ROUTES`.

    An expert's number has 1 byte up to 128 experts and 2 above (nemo_rl/models/generation/interfaces.py).
    They go from the engines through Ray's object store to the driver, and from there to the ranks that train.
    """
    shape = case.shape
    width = 1 if shape.num_experts <= 128 else 2
    num_bytes = case.work.tokens * shape.num_sparse_layers * shape.num_experts_per_token * width
    return 2 * num_bytes / ROUTES


def checkpoint_seconds(shape: ModelSpec, setup: Setup, *, saves_optimizer: bool) -> float:
    """2 bytes per parameter, and 12 of optimizer state, at `STORAGE` per training node."""
    num_bytes = model_parameters(shape) * (14 if saves_optimizer else 2)
    return num_bytes / (STORAGE * max(setup.world_size // setup.gpus_per_node, 1))
