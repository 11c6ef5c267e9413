"""Access to the installed NeMo-RL: imports by name, the tested version that it matches, rebinding.

A name of `host_api` that does not fit raises an error here, before any GPU is allocated.
"""

import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nemo_grpo.nemorl.host_api import EVERY_RUN, GRPO, HEAD, REBOUND, TESTED, V0_7_0, Name, tested
from nemo_grpo.support.errors import UserError

if TYPE_CHECKING:
    from nemo_grpo.nemorl.doctor import Misfit

log = logging.getLogger(__name__)


def import_name(name: str) -> Any:
    """Import ``module:name``."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def has_name(name: str) -> bool:
    """Return True if the module can be imported and has the name."""
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
    # 0.7.0's configuration is typed dictionaries; later versions made pydantic models of them.
    return HEAD if hasattr(grpo_config, "model_fields") else V0_7_0


def check() -> str:
    """Check that this NeMo-RL has all that every run needs, and return the version that it matches."""
    matching_version = version()
    require(EVERY_RUN)
    log.info("NeMo-RL at %s has the signatures of %s", package_folder(), TESTED[matching_version])
    return matching_version


def require(part: str) -> None:
    """Check that NeMo-RL has the names that a part of this package needs, with their signatures."""
    misfits = [str(misfit) for misfit in installed() if misfit.name.part == part]
    if misfits:
        raise UserError(
            f"nemo_rl at {package_folder()} does not fit ({part}): {'; '.join(misfits)}; "
            f"use a tested version: {tested()}"
        )


@cache
def installed() -> "list[Misfit]":
    """Find the names of `HOST_API` that are gone or changed in the NeMo-RL that would be imported."""
    # Imports griffe, which NeMo-RL's workers need not have.
    from nemo_grpo.nemorl.doctor import check_tree

    return check_tree(package_folder().parent)


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
    bindings = []
    for place in (module, *name.also):
        try:
            owner = importlib.import_module(place)
            for part in outer:
                owner = getattr(owner, part)
            getattr(owner, last)
        except (ImportError, AttributeError):
            continue
        bindings.append((owner, last))
    if not bindings:
        raise UserError(f"NeMo-RL has no {name.name}; use a tested version: {tested()}")
    return bindings


def rebind(key: str, make: Make, owner: Any = None) -> Callable[[], None]:
    """Replace one of NeMo-RL's objects by ``make(original)``, in every module that has imported it.

    Args:
        key: key of `REBOUND`.
        make: makes our object from NeMo-RL's.
        owner: instance whose method is replaced; None: replace in the modules and classes of `REBOUND`.

    Returns:
        A function that restores the originals.
    """
    name = REBOUND[key]
    bindings = places(name) if owner is None else [(owner, name.name.rpartition(".")[2])]
    originals = []
    for holder, attribute in bindings:
        bound = getattr(holder, attribute)
        # Restore the entry itself, such as a staticmethod: getattr returns the function inside it.
        originals.append((holder, attribute, vars(holder).get(attribute, bound)))
    for holder, attribute in bindings:
        setattr(holder, attribute, make(getattr(holder, attribute)))

    def undo() -> None:
        for holder, attribute, original in originals:
            setattr(holder, attribute, original)

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
            f"expected; use a tested version: {tested()}"
        )
    return Parts(*result)
