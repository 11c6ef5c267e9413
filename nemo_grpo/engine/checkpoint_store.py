"""Checkpoints that are either complete or not there.

Layout (NeMo-RL's, so that the same converter reads both):

    checkpoints/step_000120/policy/weights/iter_0000000/   torch_dist: model, optimizer, schedule
    checkpoints/step_000120/policy/tokenizer/              tokenizer and config.json
    checkpoints/step_000120/training_info.json             step, data position, metrics
    checkpoints/step_000120/SHA256SUMS                     of all these files
    checkpoints/latest                                     name of the newest, written last
    checkpoints/best                                       link to the best by the recipe's metric, if any

A checkpoint is written under a temporary name, flushed to disk, and renamed. Before a run resumes from it,
its files are compared with their hashes.
"""

import json
import logging
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_grpo.run.folder import checkpoints_in, step_of
from nemo_grpo.support.errors import UserError, reading
from nemo_grpo.support.files import (
    SHA256SUMS,
    check_sha256,
    files_in,
    publish_folder,
    write_atomically,
    write_sha256,
)

log = logging.getLogger(__name__)

WEIGHTS = Path("policy/weights/iter_0000000")
INFO = "training_info.json"
LATEST = "latest"
BEST = "best"
_TEMPORARY = "tmp_"
"""Prefix of folders that are being written or removed."""
_DAMAGED = "damaged_"
"""Prefix of checkpoints whose files do not match their hashes."""


@dataclass(frozen=True)
class CheckpointStore:
    """The checkpoints of one run.

    Attributes:
        keep_top_k: number to keep by ``metric``, besides the newest; None: all. Of checkpoints without the
            metric, which have no rank, the newest ``keep_top_k`` stay, too.
        metric: key of training_info's ``metrics``; None: the newest stay.
        leads: this process makes, renames and removes folders; the others only write into them.
        barrier: waits for all processes of the run.
    """

    folder: Path
    keep_top_k: int | None = 3
    metric: str | None = None
    higher_is_better: bool = True
    leads: bool = True
    barrier: Callable[[], None] = lambda: None

    def begin(self, step: int) -> Path:
        """Make the folder to fill before `complete`, one at a time; every process of the run calls both."""
        temporary = self.temporary(step)
        if self.leads:
            self.remove_leftovers()
            temporary.mkdir(parents=True)
        self.barrier()
        return temporary

    def complete(self, step: int, info: dict[str, Any]) -> Path:
        """Make the filled folder the checkpoint of its step; an existing one is replaced."""
        final = self.folder / _name(step)
        self.barrier()
        if self.leads:
            self._publish(self.temporary(step), final, {"step": step, **info})
        self.barrier()
        return final

    def temporary(self, step: int) -> Path:
        """Return the folder of a checkpoint between `begin` and `complete`."""
        return self.folder / f"{_TEMPORARY}{_name(step)}"

    def _publish(self, temporary: Path, final: Path, info: dict[str, Any]) -> None:
        """Write what belongs to a complete checkpoint, rename it, and remove those that it replaces."""
        (temporary / INFO).write_text(json.dumps(info, indent=2))
        write_sha256(temporary)
        publish_folder(temporary, final)
        write_atomically(self.folder / LATEST, final.name)
        self._prune(final)
        self._name_best()

    def remove_leftovers(self) -> None:
        """Remove what a killed save or removal left behind, and name the newest checkpoint."""
        for leftover in self.folder.glob(f"{_TEMPORARY}*"):
            _delete(leftover)
        if (newest := self.latest()) is not None:
            write_atomically(self.folder / LATEST, newest.name)
        self._name_best()

    def best(self) -> Path | None:
        """Find the best checkpoint by the metric, of equal ones the newest; None: none has the metric."""
        ranked = [path for path in self._complete() if self._value(path) is not None]
        return max(ranked, key=self._rank, default=None)

    def _name_best(self) -> None:
        """Link `BEST` to the best checkpoint; a link, so that every command takes it for the folder."""
        best = self.best()
        link = self.folder / BEST
        if best is None:
            link.unlink(missing_ok=True)
            return
        if link.is_symlink() and link.readlink() == Path(best.name):
            return
        # Renamed into place, so that a reader never finds the name without a link.
        temporary = self.folder / f"{_TEMPORARY}{BEST}"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(best.name)
        temporary.replace(link)

    def latest(self) -> Path | None:
        """Find the newest complete checkpoint; after a kill `LATEST` may still name the one before."""
        complete = self._complete()
        return complete[-1] if complete else None

    def newest_whole(self) -> Path | None:
        """Find the newest checkpoint whose files match their hashes; None if the run has no checkpoint.

        Newer ones, which are damaged, are renamed. Every process of the run calls it.
        """
        if self.leads:
            self._set_damaged_aside()
        self.barrier()
        return self.latest()

    def _set_damaged_aside(self) -> None:
        """Rename damaged checkpoints that are newer than the newest whole one.

        Raises:
            UserError: all of them are damaged; none is renamed.
        """
        damages: dict[Path, UserError] = {}
        has_whole = False
        for path in reversed(checkpoints_in(self.folder)):
            try:
                _check(path)
            except UserError as error:
                damages[path] = error
            else:
                has_whole = True
                break
        if damages and not has_whole:
            reasons = "; ".join(map(str, damages.values()))
            raise UserError(
                f"no checkpoint of {self.folder} is whole ({reasons}); restore one, or start another "
                "nemo_grpo.run_name"
            )
        for path, damage in damages.items():
            aside = path.with_name(f"{_DAMAGED}{path.name}")
            # The checkpoint of this step may have been damaged before, too.
            if aside.exists():
                aside = aside.with_name(f"{aside.name}.{time.time_ns()}")
            log.error("%s is damaged and set aside as %s: %s", path.name, aside.name, damage)
            path.rename(aside)

    def _complete(self) -> list[Path]:
        """List the complete checkpoints, from the first step to the last."""
        return [path for path in checkpoints_in(self.folder) if (path / INFO).exists()]

    def _prune(self, newest: Path) -> None:
        """Remove the checkpoints that `keep_top_k` does not keep; the newest one stays, to resume from."""
        if self.keep_top_k is None:
            return
        complete = self._complete()
        ranked = [path for path in complete if self._value(path) is not None]
        # From the worst to the best; those without the metric are from the oldest to the newest.
        ranked.sort(key=self._rank)
        unranked = [path for path in complete if path not in ranked]
        for path in ranked[: -self.keep_top_k] + unranked[: -self.keep_top_k]:
            if path != newest:
                log.info("removing checkpoint %s (keep_top_k=%d)", path.name, self.keep_top_k)
                self._remove(path)

    def _remove(self, path: Path) -> None:
        """Rename, then delete: a kill halfway must not leave something that looks complete."""
        condemned = path.with_name(f"{_TEMPORARY}removed_{path.name}.{time.time_ns()}")
        path.rename(condemned)
        _delete(condemned)

    def _value(self, path: Path) -> float | None:
        """Return the checkpoint's metric; None: it was not validated, or nothing ranks checkpoints."""
        if self.metric is None:
            return None
        value: float | None = read_info(path).get("metrics", {}).get(self.metric)
        # JSON's NaN has no place in an order.
        if value is None or not math.isfinite(value):
            return None
        return value

    def _rank(self, path: Path) -> tuple[float, str]:
        """Return a key that is larger for a better checkpoint, and of equal ones for a newer one."""
        value = self._value(path)
        assert value is not None
        better = value if self.higher_is_better else -value
        return better, path.name


def _delete(path: Path) -> None:
    """Delete; a failure does not end the run, and the next save tries again."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:  # NFS keeps files that are open
        log.warning("%s stays for now: %s", path, error)


def _check(checkpoint: Path) -> None:
    """Refuse a checkpoint whose files are not those that were written."""
    num_listed = check_sha256(checkpoint)
    num_unlisted = len(files_in(checkpoint)) - num_listed
    if num_unlisted:
        raise UserError(
            f"{checkpoint / SHA256SUMS} lacks {num_unlisted} of the files there; restore the folder"
        )
    if read_info(checkpoint).get("step") != step_of(checkpoint):
        raise UserError(f"{checkpoint / INFO} is of another step; restore the folder")


def _name(step: int) -> str:
    return f"step_{step:06d}"


def read_info(checkpoint: Path) -> dict[str, Any]:
    """Read the checkpoint's training_info.json."""
    path = checkpoint / INFO
    remedy = "the checkpoint is damaged, remove its folder and resume again"
    with reading(path, "a mapping in JSON", remedy, TypeError):
        return dict(json.loads(path.read_text()))
