"""Every name of NeMo-RL that this package calls, reads or replaces, read from ``host_api.yaml``.

NeMo-RL's source is not changed: `compat.rebind` rebinds names while a run lasts, and nothing else does.
`doctor` compares `HOST_API` with a NeMo-RL tree, `compat.check` with the installed one.
"""

from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import yaml

from nemo_grpo.recipe.schema import HEAD as HEAD
from nemo_grpo.recipe.schema import V0_7_0 as V0_7_0

TESTED = {V0_7_0: "the release 0.7.0", HEAD: "the commit 7ea279abf"}
"""Version -> its name in messages. NeMo-RL's own number is no guide: HEAD calls itself 0.6.0."""
BOTH = (V0_7_0, HEAD)

EVERY_RUN = "every run"
ENTROPIES = "variants with entropies"
STAGES = "pipeline stages at a temperature other than 1"
SUPERVISED = "supervised training"
OWN_DATA = "recipes with NeMo-RL's own data"
NEMO_GYM = "recipes with NeMo-Gym's environments"
DATA_PLANE = "recipes with data_plane.enabled"
SINGLE_CONTROLLER = "recipes with async_rl"
REHEARSAL = "rehearsals"
"""Parts of this package that need names of NeMo-RL, from `EVERY_RUN` on."""
ELSEWHERE = (DATA_PLANE, SINGLE_CONTROLLER, ENTROPIES, STAGES, REHEARSAL)
"""Parts whose names the driver does not import; some need megatron-core or vLLM."""


def tested() -> str:
    """Name the tested versions, for a message."""
    return " or ".join(TESTED.values())


GRPO, GRPO_SYNC = "nemo_rl.algorithms.grpo", "nemo_rl.algorithms.grpo_sync"
CONTROLLER = "nemo_rl.algorithms.single_controller_utils.setup"
POLICY = "nemo_rl.models.policy.lm_policy:Policy"
TQ_POLICY = "nemo_rl.models.policy.tq_policy:TQPolicy"
SFT = "nemo_rl.algorithms.sft"
CONTROLLER_ACTOR = "nemo_rl.algorithms.single_controller:SingleControllerActor"
CONTROLLER_CONFIG = "nemo_rl.algorithms.single_controller_utils.config"
_ACTORS = "nemo_rl.distributed.ray_actor_environment_registry"
ACTOR_PYTHONS, ACTOR_PYTHON = f"{_ACTORS}:ACTOR_ENVIRONMENT_REGISTRY", f"{_ACTORS}:get_actor_python_env"
"""Table of the actors' interpreters, and the function that looks one up."""
STOCK_WORKER = "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker"
"""NeMo-RL's Megatron worker, as its table of interpreters names it."""
GYM_SETTINGS = "nemo_rl.environments.nemo_gym:setup_nemo_gym_config"
VIDEO_SETTINGS = "nemo_rl.models.generation.vllm.config:materialize_vllm_video_config"

BASE, VISION_BASE = "grpo_math_1B_megatron.yaml", "vlm_grpo_3B_megatron.yaml"
"""NeMo-RL's base configurations in ``examples/configs``, for text and for images."""


How = Literal["used", "repeated", "replaced", "wrapped", "implemented", "overridden"]


class Name(NamedTuple):
    """One name of NeMo-RL.

    Attributes:
        key: its key in the records and for `compat.rebind`.
        name: ``module:function`` or ``module:Class.method``.
        how: ``used``: we call or read it. ``repeated``: ours repeats its code, which is compared, too.
            ``replaced``, ``wrapped``: ours is bound in its place; a wrapper calls NeMo-RL's with every
            argument. ``implemented``: NeMo-RL takes our object. ``overridden``: a method of a subclass.
        ours: our code in its place, in the same form, whose signature must take NeMo-RL's calls; of a used
            name our subclass, which must define every abstract method.
        why: purpose of the replacement.
        versions: the tested versions that have it.
        part: the part of this package that needs it.
        returns: the result is unpacked by position.
        call: our arguments, as ``(_, _, processor=_)``; a class is called by its fields.
        reads: names that we expect on it: attributes, members of an enumeration, keys of a table.
        also: further modules that import the name; each is rebound.
        called: how NeMo-RL's source calls it, unless by its own name: ``policy.train`` is the method of
            anything whose name ends in ``policy``.
        guard: only calls under an ``if`` that names this class count.
        within: modules whose calls count, by prefix.
    """

    key: str
    name: str
    ours: str = ""
    how: How = "used"
    why: str = ""
    versions: tuple[str, ...] = BOTH
    part: str = EVERY_RUN
    returns: bool = False
    call: str = ""
    reads: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    called: str = ""
    guard: str = ""
    within: str = "nemo_rl"

    @property
    def is_required(self) -> bool:
        """True if every tested version has it."""
        return self.versions == BOTH

    @property
    def is_used(self) -> bool:
        """True if nothing of ours stands in its place."""
        return self.how in ("used", "repeated")


def _name(key: str, ours: str = "", repeated: bool = False, **fields: Any) -> Name:
    """Make a `Name` from a row of the file."""
    how: How = next((how for how in get_args(How)[2:] if how in fields), "repeated" if repeated else "used")
    ours = fields.pop(how, ours)  # without nemo_grpo.nemorl
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    key, name = f"{key} (code)" if repeated else key, fields.pop("name", key)
    return Name(key, name, ours and f"nemo_grpo.nemorl.{ours}", how, **fields)


def _read(path: Path) -> dict[str, Name]:
    tables = yaml.safe_load(path.read_text(encoding="utf-8"))
    names = [_name(key, **row) for key, row in tables["replaced"].items()]
    for part, rows in tables["used"].items():
        names += [_name(key, part=part, **row) for key, row in rows.items()]
    return {name.key: name for name in names}


HOST_API = _read(Path(__file__).with_name("host_api.yaml"))
"""Key -> name, in the order of `nemo-grpo doctor`."""
LOSS_KEYS = HOST_API["nemo_rl.algorithms.loss.loss_functions:ClippedPGLossConfig"].reads
"""Keys of ``loss_fn`` that mean to NeMo-RL what they mean to every variant with a ratio."""
