"""A killed conversion to Megatron that NeMo-RL mistakes for a finished one.

NeMo-RL converts a model to Megatron once, into a folder that its jobs share. It regards the conversion as
finished if ``iter_0000000`` exists. A killed conversion lacks ``run_config.yaml``, which is written last:
every later start would skip the conversion and fail with "Pretrained run config not found".

Upstream: none known; NeMo-RL issue 1770 has the same message, from a folder that the nodes do not share.
Versions: NeMo-RL 0.7.0 and 7ea279abf.
Needed while: tests/nemo_rl/test_killed_conversion.py::test_nemo_rl_takes_remains_for_a_conversion
"""

import glob
import logging
import os
import shutil
import time
from pathlib import Path
from typing import Any

from nemo_grpo.nemorl import compat
from nemo_grpo.support.dotted import value_of
from nemo_grpo.support.errors import UserError

log = logging.getLogger(__name__)

ITERATION = "iter_0000000"
"""Folder of a conversion; NeMo-RL checks only that it exists."""
LAST_FILE = "run_config.yaml"
"""File that a conversion writes last."""
STILL_S = 600.0
"""Seconds without a write after which the job of an incomplete conversion is regarded as dead."""
POLL_S = 30.0
"""Seconds between two looks at a folder that another job may be writing."""


def conversions(policy: Any) -> list[Path]:
    """List the folders into which NeMo-RL converts this model, one for each set of ``hf_config_overrides``.

    Args:
        policy: section of NeMo-RL's configuration.

    Returns:
        The folders, of which the first may not exist; [] if NeMo-RL converts nothing or always anew.
    """
    if value_of(policy, "pretrained_checkpoint") or value_of(policy, "megatron_cfg.force_reconvert_from_hf"):
        return []
    name = policy["model_name"]
    # NeMo-RL derives the folder from the model's name like this.
    if os.path.exists(name):
        name = f"model_{name.replace('/', '_')}"
    parent = compat.import_name("nemo_rl.models.policy.utils:get_megatron_checkpoint_dir")()
    root = os.path.join(parent, name)
    overridden = glob.glob(f"{glob.escape(root)}__hfovr_*")
    return [Path(folder) / ITERATION for folder in (root, *sorted(overridden))]


def remove_remains(policy: Any) -> None:
    """Remove incomplete conversions, so that NeMo-RL converts again.

    Another job may be converting right now, so a folder is removed only after `STILL_S` without a write, and
    stays if it becomes complete before. Folders on the disks of other nodes are not seen
    (NRL_MEGATRON_CHECKPOINT_DIR may be such a folder).
    """
    for folder in conversions(policy):
        while folder.is_dir() and not (folder / LAST_FILE).exists():
            seconds_still = time.time() - last_written(folder)
            if seconds_still >= STILL_S:
                _remove(folder)
                break
            log.warning(
                "%s is incomplete, with its last write %.0f s ago: waiting for the job that converts it; the "
                "folder will be removed after %.0f s without a write",
                folder,
                seconds_still,
                STILL_S,
            )
            time.sleep(min(POLL_S, STILL_S - seconds_still))


def last_written(folder: Path) -> float:
    """Find the time of the newest change within a folder, in seconds since the epoch."""
    times = []
    for path in (folder, *folder.rglob("*")):
        try:
            times.append(path.stat().st_mtime)
        except FileNotFoundError:
            # Another job renamed its temporary file since the folder was listed.
            continue
    return max(times, default=0.0)


def _remove(folder: Path) -> None:
    """Remove a folder that several jobs may want to remove at the same time."""
    log.warning("removing %s: a killed conversion left it without %s", folder, LAST_FILE)
    # Rename it before deleting, so that no other job sees a half-deleted folder.
    away = folder.with_name(f".{ITERATION}-incomplete-{os.getpid()}")
    try:
        folder.rename(away)
    except FileNotFoundError:
        # Another job was first.
        return
    except OSError as error:
        raise UserError(
            f"{folder} is left from a killed conversion, NeMo-RL would fail on it, and it cannot be moved "
            f"({error.strerror}); remove it, or set NRL_MEGATRON_CHECKPOINT_DIR to a folder of your own"
        ) from None
    shutil.rmtree(away, ignore_errors=True)
