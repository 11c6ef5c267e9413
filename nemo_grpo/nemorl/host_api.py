"""Table of NeMo-RL's names that this package calls or replaces, read from ``host_api.yaml``, and constants.

NeMo-RL's source is not changed: `compat.rebind` rebinds names while a run lasts, and nothing else does.
"""

from pathlib import Path
from typing import NamedTuple

from nemo_grpo.recipe.schema import HEAD as HEAD
from nemo_grpo.recipe.schema import V0_7_0 as V0_7_0
from nemo_grpo.support.files import read_yaml

TESTED = {V0_7_0: "the release 0.7.0", HEAD: "the commit 7ea279abf"}
"""Version -> its name in messages. NeMo-RL's own number is no guide: HEAD calls itself 0.6.0."""

EVERY_RUN = "every run"
ENTROPIES = "variants with entropies"
STAGES = "pipeline stages at a temperature other than 1"
SUPERVISED = "supervised training"
OWN_DATA = "recipes with NeMo-RL's own data"
NEMO_GYM = "recipes with NeMo-Gym's environments"
IMAGES = "tasks with images"
DATA_PLANE = "recipes with data_plane.enabled"
SINGLE_CONTROLLER = "recipes with async_rl"
"""Parts of this package that need names of NeMo-RL, from `EVERY_RUN` on."""


def tested() -> str:
    """Name the tested versions, for a message."""
    return " or ".join(TESTED.values())


GRPO = "nemo_rl.algorithms.grpo"
GRPO_SYNC = "nemo_rl.algorithms.grpo_sync"
CONTROLLER = "nemo_rl.algorithms.single_controller_utils.setup"
POLICY = "nemo_rl.models.policy.lm_policy:Policy"
TQ_POLICY = "nemo_rl.models.policy.tq_policy:TQPolicy"
SFT = "nemo_rl.algorithms.sft"
CONTROLLER_ACTOR = "nemo_rl.algorithms.single_controller:SingleControllerActor"
CONTROLLER_CONFIG = "nemo_rl.algorithms.single_controller_utils.config"
_ACTORS = "nemo_rl.distributed.ray_actor_environment_registry"
ACTOR_PYTHONS = f"{_ACTORS}:ACTOR_ENVIRONMENT_REGISTRY"
"""Table of the actors' interpreters."""
ACTOR_PYTHON = f"{_ACTORS}:get_actor_python_env"
"""Function that looks up an actor's interpreter."""
STOCK_WORKER = "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker"
"""NeMo-RL's Megatron worker, as its table of interpreters names it."""


class Name(NamedTuple):
    """One name of NeMo-RL; the fields are explained at the top of host_api.yaml."""

    name: str
    part: str = EVERY_RUN
    signature: str | None = None
    key: str = ""
    also: tuple[str, ...] = ()
    optional: bool = False


def _read_table() -> list[Name]:
    """Read host_api.yaml, in which a row with a signature alone is short for ``{signature: ...}``."""
    table = []
    for part, rows in read_yaml(Path(__file__).with_suffix(".yaml")).items():
        for name, row in rows.items():
            fields = row if isinstance(row, dict) else {"signature": row}
            table.append(Name(name, part, **fields))
    return table


HOST_API = _read_table()
REBOUND = {name.key: name for name in HOST_API if name.key}
"""Key of `compat.rebind` -> name."""
