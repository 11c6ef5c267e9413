"""The NeMo-RL version, and every NeMo-RL name that we use.

A name that has moved is an error here, before any GPU is allocated.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from nemo_grpo.errors import UserError

log = logging.getLogger(__name__)

V0_7_0, HEAD = "0.7.0", "7ea279abf"
TESTED = {V0_7_0: "the release 0.7.0", HEAD: "the commit 7ea279abf"}
"""Versions that the tests run on. The package's version number is no guide: HEAD calls itself 0.6.0."""

BOTH = (V0_7_0, HEAD)
GRPO, _WORKER = "nemo_rl.algorithms.grpo", "nemo_rl.models.policy.workers.megatron_policy_worker"
_ACTORS = "nemo_rl.distributed.ray_actor_environment_registry"
ACTOR_PYTHONS, ACTOR_PYTHON = f"{_ACTORS}:ACTOR_ENVIRONMENT_REGISTRY", f"{_ACTORS}:get_actor_python_env"
"""The interpreter of each actor, and the function that completes it."""

NAMES: dict[str, tuple[str, ...]] = {
    f"{GRPO}:MasterConfig": BOTH,
    f"{GRPO}:setup": BOTH,
    f"{GRPO}:grpo_train": BOTH,
    f"{GRPO}:async_grpo_train": BOTH,
    f"{GRPO}:dynamic_sampling": BOTH,
    f"{GRPO}:_create_advantage_estimator": BOTH,
    f"{GRPO}:shutdown_environments": (HEAD,),
    f"{GRPO}:_validation_early_stop_message": (HEAD,),
    "nemo_rl.algorithms.grpo_sync:_create_advantage_estimator": BOTH,
    "nemo_rl.algorithms.loss.interfaces:LossInputType": BOTH,
    "nemo_rl.algorithms.loss.interfaces:LossType": BOTH,
    "nemo_rl.algorithms.loss.interfaces:MetricNormalizer": (HEAD,),
    "nemo_rl.algorithms.sft:MasterConfig": BOTH,
    "nemo_rl.algorithms.sft:setup": BOTH,
    "nemo_rl.algorithms.sft:sft_train": BOTH,
    "nemo_rl.algorithms.utils:get_tokenizer": BOTH,
    "nemo_rl.data.interfaces:TaskDataSpec": BOTH,
    "nemo_rl.data.processors:vlm_hf_data_processor": BOTH,
    "nemo_rl.distributed.batched_data_dict:BatchedDataDict": BOTH,
    ACTOR_PYTHONS: BOTH,
    ACTOR_PYTHON: BOTH,
    "nemo_rl.distributed.virtual_cluster:init_ray": BOTH,
    "nemo_rl.environments.interfaces:EnvironmentInterface": BOTH,
    "nemo_rl.environments.interfaces:EnvironmentReturn": BOTH,
    "nemo_rl.environments.utils:ENV_REGISTRY": BOTH,
    "nemo_rl.environments.utils:create_env": BOTH,
    "nemo_rl.models.generation:configure_generation_config": BOTH,
    "nemo_rl.models.generation.vllm.vllm_generation:VllmGeneration": BOTH,
    "nemo_rl.models.policy.lm_policy:Policy": BOTH,
    "nemo_rl.models.policy.utils:get_megatron_checkpoint_dir": BOTH,
    "nemo_rl.utils.checkpoint:CheckpointManager": BOTH,
    "nemo_rl.utils.config:load_config": BOTH,
    "nemo_rl.utils.config:register_omegaconf_resolvers": BOTH,
    "nemo_rl.utils.logger:get_next_experiment_dir": BOTH,
    "nemo_rl.utils.timer:TimeoutChecker": BOTH,
    "nemo_rl.utils.venvs:DEFAULT_VENV_DIR": BOTH,
    "nemo_rl.utils.venvs:create_local_venv_on_each_node": BOTH,
}
"""``module:name`` -> the versions that have it; imported by the driver."""

WORKER_NAMES: dict[str, tuple[str, ...]] = {
    f"{_WORKER}:MegatronPolicyWorkerImpl": BOTH,
    f"{_WORKER}:LogprobsPostProcessor": BOTH,
    "nemo_rl.distributed.model_utils:allgather_cp_sharded_tensor": BOTH,
    "nemo_rl.models.megatron.pipeline_parallel:broadcast_tensors_from_last_stage": BOTH,
    "nemo_rl.models.megatron.train:LogprobsPostProcessor": BOTH,
    "nemo_rl.models.megatron.train:apply_temperature_scaling": BOTH,
    "nemo_rl.models.policy.utils:get_runtime_env_for_policy_worker": BOTH,
}
"""The same for Megatron workers; these import megatron-core."""

ESTIMATOR_NAMESPACES = (
    GRPO,
    "nemo_rl.algorithms.grpo_sync",
    "nemo_rl.algorithms.single_controller_utils.setup",
)
"""Modules that bind `_create_advantage_estimator`; the last one is not in 0.7.0."""


def import_name(name: str) -> Any:
    """The object behind ``module:name``."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def has_name(name: str) -> bool:
    """True if the module is there and has the name; a module that fails to import is not there."""
    try:
        import_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def version() -> str:
    """The version of `TESTED` that this NeMo-RL matches, judged by its configuration classes.

    Raises: UserError: NeMo-RL cannot be imported, or matches none of them.
    """
    try:
        grpo_config = import_name(f"{GRPO}:GRPOConfig")
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"nemo_rl cannot be imported ({error}); run this in NeMo-RL's container or environment, tested: "
            f"{_tested()}"
        ) from None
    return HEAD if hasattr(grpo_config, "model_fields") else V0_7_0


def check(names: Mapping[str, tuple[str, ...]] = NAMES) -> str:
    """Check that this NeMo-RL has every name that we use.

    Args:    names: `NAMES`, or `WORKER_NAMES` in a worker's process.
    Returns: the version of `TESTED` that it matches.
    Raises:  UserError: names are missing.
    """
    like = version()
    missing = [name for name, versions in names.items() if like in versions and not has_name(name)]
    if missing:
        import nemo_rl

        raise UserError(
            f"nemo_rl {nemo_rl.__version__} at {list(nemo_rl.__path__)} looks like {TESTED[like]} but lacks "
            f"{', '.join(missing)}; use a tested version: {_tested()}"
        )
    log.info("NeMo-RL has the interface of %s", TESTED[like])
    return like


def _tested() -> str:
    return " or ".join(TESTED.values())


def keep_tensor_pickles_plain() -> None:
    """Let processes without Megatron read the tensors that this one sends.

    Importing megatron.core replaces the function that pickled tensors refer to by its own, and the driver
    imports it unasked when it unpickles a Megatron worker's result. vLLM's workers may not have megatron. So
    import it now, once, and put torch's function back.
    """
    import torch

    plain = torch.storage._load_from_bytes
    if has_name("megatron.core:__version__"):
        torch.storage._load_from_bytes = plain


def replace_global(name: str, new: Any, modules: tuple[str, ...]) -> None:
    """Rebind a module's global in every module of ``modules`` that this version has."""
    for module in modules:
        if has_name(f"{module}:{name}"):
            setattr(importlib.import_module(module), name, new)


@contextmanager
def replaced(owner: Any, name: str, new: Any) -> Iterator[None]:
    """Replace an attribute within the block."""
    before = getattr(owner, name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, before)


class Setup(NamedTuple):
    """What NeMo-RL's `setup` returns, by position."""

    policy: Any
    policy_generation: Any
    nemo_gym: Any
    cluster: Any
    dataloader: Any
    val_dataloader: Any
    loss_fn: Any
    logger: Any
    checkpointer: Any
    grpo_save_state: Any
    master_config: Any
    teacher_worker_groups: Any
    alias_to_group_alias: Any


def unpack_setup(result: tuple[Any, ...]) -> Setup:
    """Name the values that `setup` returned.

    Raises: UserError: their number differs from the tested versions'.
    """
    if len(result) != len(Setup._fields):
        raise UserError(
            f"nemo_rl.algorithms.grpo.setup returned {len(result)} values where {len(Setup._fields)} are "
            f"known; use a tested version: {_tested()}"
        )
    return Setup(*result)
