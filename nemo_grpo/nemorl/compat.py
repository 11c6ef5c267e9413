"""Access to the installed NeMo-RL: imports by name, the tested version that it matches, rebinding.

A name of `host_api` that has moved raises an error here, before any GPU is allocated.
"""

import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nemo_grpo.nemorl.host_api import ELSEWHERE, EVERY_RUN, GRPO, HEAD, HOST_API, TESTED, V0_7_0, Name, tested
from nemo_grpo.support.errors import UserError

if TYPE_CHECKING:
    from nemo_grpo.nemorl.doctor import Diagnosis

log = logging.getLogger(__name__)


def import_name(name: str) -> Any:
    """Import ``module:name``."""
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
    """Find the version of `TESTED` that this NeMo-RL matches, by its configuration classes."""
    try:
        grpo_config = import_name(f"{GRPO}:GRPOConfig")
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"nemo_rl cannot be imported ({error}); run this in NeMo-RL's container or environment, tested: "
            f"{tested()}"
        ) from None
    return HEAD if hasattr(grpo_config, "model_fields") else V0_7_0


def check() -> str:
    """Check that this NeMo-RL has what every run needs; returns the version of `TESTED` that it matches."""
    like = version()
    used = (one for one in HOST_API.values() if one.how == "used" and one.part not in ELSEWHERE)
    missing = [one.name for one in used if one.is_required and not has_name(one.name)]
    if missing:
        raise UserError(
            f"nemo_rl at {package_folder()} looks like {TESTED[like]} but lacks {', '.join(missing)}; use a "
            f"tested version: {tested()}"
        )
    require(EVERY_RUN)
    found = installed()
    if found.verdict == "supported":
        log.info("NeMo-RL has the interface of %s", TESTED[found.like])
    else:
        differences = "".join(f"\n  {finding}" for finding in found.differences)
        log.warning(
            "NeMo-RL at %s is %s; tested: %s. Against %s:%s",
            *(package_folder(), found.verdict, tested(), TESTED[found.like], differences),
        )
    return like


def require(part: str) -> None:
    """Check that the names which a part of this package needs are intact."""
    broken = [finding for finding in installed().findings if finding.breaks and finding.part == part]
    if broken:
        raise UserError(
            f"nemo_rl at {package_folder()} does not fit ({part}): {'; '.join(map(str, broken))}; "
            f"use a tested version: {tested()}"
        )


@cache
def installed() -> "Diagnosis":
    """Diagnose the NeMo-RL that would be imported."""
    from nemo_grpo.nemorl.doctor import diagnose_tree  # griffe, which NeMo-RL's workers need not have

    return diagnose_tree(package_folder().parent)


def package_folder() -> Path:
    """Find the folder of ``nemo_rl``."""
    import nemo_rl

    return Path(next(iter(nemo_rl.__path__)))


Make = Callable[[Any], Any]
"""NeMo-RL's object -> ours, which takes its place."""


def places(name: Name) -> list[tuple[Any, str]]:
    """List (owner, attribute) wherever this NeMo-RL binds a name."""
    module, _, path = name.name.partition(":")
    *outer, last = path.split(".")
    found = []
    for place in (module, *name.also):
        try:
            owner = importlib.import_module(place)
            for part in outer:
                owner = getattr(owner, part)
            getattr(owner, last)
        except (ImportError, AttributeError):
            continue
        found.append((owner, last))
    if not found and name.is_required:
        raise UserError(f"NeMo-RL has no {name.name}; use a tested version: {tested()}")
    return found


def rebind(key: str, make: Make, owner: Any = None) -> Callable[[], None]:
    """Put ``make(theirs)`` wherever NeMo-RL binds a name.

    Args:    key: of `HOST_API`.  owner: one object, whose method alone is replaced.
    Returns: a function that puts everything back.
    """
    name = HOST_API[key]
    where = places(name) if owner is None else [(owner, name.name.rpartition(".")[2])]
    before = [(holder, last, vars(holder).get(last, getattr(holder, last))) for holder, last in where]
    for holder, last in where:
        setattr(holder, last, make(getattr(holder, last)))

    def undo() -> None:
        for holder, last, theirs in before:
            setattr(holder, last, theirs)

    return undo


@contextmanager
def rebound(key: str, make: Make, owner: Any = None) -> Iterator[None]:
    """Apply `rebind` for the length of a block."""
    undo = rebind(key, make, owner)
    try:
        yield
    finally:
        undo()


class Parts(NamedTuple):
    """Values that NeMo-RL's `setup` returns, by position; None where another setup has none."""

    policy: Any = None
    policy_generation: Any = None
    nemo_gym: Any = None
    cluster: Any = None
    dataloader: Any = None
    val_dataloader: Any = None
    loss_fn: Any = None
    logger: Any = None
    checkpointer: Any = None
    grpo_save_state: Any = None
    master_config: Any = None
    teacher_worker_groups: Any = None
    alias_to_group_alias: Any = None


def unpack_setup(result: tuple[Any, ...]) -> Parts:
    """Name the values that `setup` returned."""
    if len(result) != len(Parts._fields):
        raise UserError(
            f"nemo_rl.algorithms.grpo.setup returned {len(result)} values where {len(Parts._fields)} are "
            f"known; use a tested version: {tested()}"
        )
    return Parts(*result)
