"""The checkpoints of a run on disk. A checkpoint is either complete or not there.

The layout is NeMo-RL's, so the same converter reads both engines' checkpoints:

    checkpoints/step_000120/policy/weights/iter_0000000/   torch_dist: model, optimizer, schedule
    checkpoints/step_000120/policy/tokenizer/              tokenizer and config.json
    checkpoints/step_000120/training_info.json             step, position in the data, metrics
    checkpoints/step_000120/SHA256SUMS                     hashes of all these files
    checkpoints/latest                                     name of the newest checkpoint, written last
    checkpoints/best                                       link to the best checkpoint by the recipe's metric

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
        folder: Folder of the checkpoints.
        keep_top_k: Number of best checkpoints to keep, besides the newest one; None keeps all. Checkpoints
            without the metric have no rank: of these the newest ``keep_top_k`` stay, too.
        metric: Key in training_info's ``metrics`` that ranks checkpoints. With None the newest ones stay.
        higher_is_better: Direction of the metric.
        leads: True on the process that makes, renames and removes folders. The others only write into them.
        barrier: Function that waits for all processes of the run.
    """

    folder: Path
    keep_top_k: int | None = 3
    metric: str | None = None
    higher_is_better: bool = True
    leads: bool = True
    barrier: Callable[[], None] = lambda: None

    def begin(self, step: int) -> Path:
        """Make a temporary folder for a checkpoint; `complete` publishes it when it is filled.

        Every process of the run calls both. Only one checkpoint may be under way.
        """
        temporary = self.temporary(step)
        if self.leads:
            self.remove_leftovers()
            temporary.mkdir(parents=True)
        self.barrier()
        return temporary

    def complete(self, step: int, info: dict[str, Any]) -> Path:
        """Publish the filled folder as the checkpoint of its step, in place of an existing one.

        Args:
            step: Step of the run.
            info: Further content of training_info.json.
        """
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
        """Complete the files of a checkpoint, rename its folder, and remove the checkpoints that may go."""
        (temporary / INFO).write_text(json.dumps(info, indent=2))
        write_sha256(temporary)
        publish_folder(temporary, final)
        write_atomically(self.folder / LATEST, final.name)
        self._prune(final)
        self._name_best()

    def remove_leftovers(self) -> None:
        """Remove what a killed save or removal left behind, and write `LATEST` and `BEST` again."""
        for leftover in self.folder.glob(f"{_TEMPORARY}*"):
            _delete(leftover)
        newest = self.latest()
        if newest is not None:
            write_atomically(self.folder / LATEST, newest.name)
        self._name_best()

    def best(self) -> Path | None:
        """Find the best checkpoint by the metric, or None if no checkpoint has the metric.

        Of equally good checkpoints it is the newest.
        """
        ranked = [path for path in self._complete() if self._value(path) is not None]
        return max(ranked, key=self._rank, default=None)

    def _name_best(self) -> None:
        """Make `BEST` a link to the best checkpoint, which every command accepts as the folder itself."""
        best = self.best()
        link = self.folder / BEST
        if best is None:
            link.unlink(missing_ok=True)
            return
        if link.is_symlink() and link.readlink() == Path(best.name):
            return
        # The new link is renamed into place, so that `BEST` exists at every moment.
        temporary = self.folder / f"{_TEMPORARY}{BEST}"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(best.name)
        temporary.replace(link)

    def latest(self) -> Path | None:
        """Find the newest complete checkpoint, without `LATEST`, which may name an older one after a kill."""
        complete = self._complete()
        return complete[-1] if complete else None

    def newest_whole(self) -> Path | None:
        """Find the newest checkpoint whose files match their hashes, or None if the run has no checkpoint.

        Newer checkpoints, which are damaged, get another name. Every process of the run calls this method.
        """
        if self.leads:
            self._set_damaged_aside()
        self.barrier()
        return self.latest()

    def _set_damaged_aside(self) -> None:
        """Rename the damaged checkpoints that are newer than the newest whole one.

        Raises:
            UserError: All checkpoints are damaged. None of them is renamed then.
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
            # An earlier checkpoint of the same step may have been damaged and renamed, too.
            if aside.exists():
                aside = aside.with_name(f"{aside.name}.{time.time_ns()}")
            log.error("%s is damaged and set aside as %s: %s", path.name, aside.name, damage)
            path.rename(aside)

    def _complete(self) -> list[Path]:
        """List the complete checkpoints, from the first step to the last."""
        return [path for path in checkpoints_in(self.folder) if (path / INFO).exists()]

    def _prune(self, newest: Path) -> None:
        """Remove the checkpoints that exceed `keep_top_k`, but never the newest one, to resume from."""
        if self.keep_top_k is None:
            return
        complete = self._complete()
        ranked = [path for path in complete if self._value(path) is not None]
        # Ranked checkpoints go from the worst to the best, unranked ones from the oldest to the newest. The
        # last ones of both lists stay.
        ranked.sort(key=self._rank)
        unranked = [path for path in complete if path not in ranked]
        for path in ranked[: -self.keep_top_k] + unranked[: -self.keep_top_k]:
            if path != newest:
                log.info("removing checkpoint %s (keep_top_k=%d)", path.name, self.keep_top_k)
                self._remove(path)

    def _remove(self, path: Path) -> None:
        """Rename a checkpoint, then delete it: a kill halfway must not leave what looks like a checkpoint."""
        condemned = path.with_name(f"{_TEMPORARY}removed_{path.name}.{time.time_ns()}")
        path.rename(condemned)
        _delete(condemned)

    def _value(self, path: Path) -> float | None:
        """Return the metric of a checkpoint, or None if it was not validated or no metric is set."""
        if self.metric is None:
            return None
        value: float | None = read_info(path).get("metrics", {}).get(self.metric)
        # NaN, which Python's JSON can hold, cannot be ordered.
        if value is None or not math.isfinite(value):
            return None
        return value

    def _rank(self, path: Path) -> tuple[float, str]:
        """Return a sort key that is larger for a better checkpoint and, at equal metrics, for a newer one."""
        value = self._value(path)
        assert value is not None
        better = value if self.higher_is_better else -value
        return better, path.name


def _delete(path: Path) -> None:
    """Delete a file or folder. A failure does not end the run; the next save tries again."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        # NFS keeps files that a process has open.
        log.warning("%s stays for now: %s", path, error)


def _check(checkpoint: Path) -> None:
    """Refuse a checkpoint with files that are changed, missing, or not listed in its hashes."""
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
