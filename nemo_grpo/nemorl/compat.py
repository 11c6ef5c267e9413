"""The installed NeMo-RL: whether it fits, which tested version it is like, and its names by import.

A name that has moved is an error here, before any GPU is allocated; `hooks` and `uses` list them.
"""

import importlib
import logging
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nemo_grpo.errors import UserError
from nemo_grpo.nemorl import hooks
from nemo_grpo.nemorl.uses import ELSEWHERE, USES
from nemo_grpo.nemorl.versions import EVERY_RUN, HEAD, TESTED, V0_7_0, tested

if TYPE_CHECKING:
    from nemo_grpo.nemorl.doctor import Diagnosis

log = logging.getLogger(__name__)

GRPO = hooks.GRPO


def import_name(name: str) -> Any:
    """The object behind ``module:name``."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def plain_class(name: str) -> Any:
    """The class behind a Ray actor's ``module:name``, for use in this process."""
    return import_name(name).__ray_metadata__.modified_class


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
            f"{tested()}"
        ) from None
    return HEAD if hasattr(grpo_config, "model_fields") else V0_7_0


def check() -> str:
    """Check that this NeMo-RL has everything that every run needs, and say whether it is a tested version.

    Returns: the version of `TESTED` that it matches.
    Raises:  UserError: names are missing, or no longer fit.
    """
    like = version()
    needed = (use.name for use in USES if use.part not in ELSEWHERE and use.is_required and not use.code)
    missing = [name for name in needed if not has_name(name)]
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
    """Check that nothing is broken that a part of this package needs.

    Raises: UserError: it is.
    """
    broken = [finding for finding in installed().findings if finding.breaks and finding.part == part]
    if broken:
        raise UserError(
            f"nemo_rl at {package_folder()} does not fit ({part}): {'; '.join(map(str, broken))}; "
            f"use a tested version: {tested()}"
        )


@cache
def installed() -> "Diagnosis":
    """Diagnosis of the NeMo-RL that would be imported."""
    from nemo_grpo.nemorl.doctor import diagnose_tree  # griffe, which NeMo-RL's workers need not have

    return diagnose_tree(package_folder().parent)


def package_folder() -> Path:
    """Where ``nemo_rl`` lies."""
    import nemo_rl

    return Path(next(iter(nemo_rl.__path__)))


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


class Parts(NamedTuple):
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


def unpack_setup(result: tuple[Any, ...]) -> Parts:
    """Name the values that `setup` returned.

    Raises: UserError: their number differs from the tested versions'.
    """
    if len(result) != len(Parts._fields):
        raise UserError(
            f"nemo_rl.algorithms.grpo.setup returned {len(result)} values where {len(Parts._fields)} are "
            f"known; use a tested version: {tested()}"
        )
    return Parts(*result)
