"""The folder of a run, ``runs/<name>/``, and the files in it.

Settings of the run: recipe.resolved.yaml  own/  versions.json  inputs.json
Rows for each step:  metrics.jsonl  samples.jsonl  diagnostics.jsonl
Results:             checkpoints/  hf/  hf-adapter/  evaluation/
For reading:         tensorboard/  plots/  report.html
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import math
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from nemo_grpo.recipe.recipe import RECIPE_FILE
from nemo_grpo.support.errors import UNREADABLE, UserError
from nemo_grpo.support.files import existing_parent, hold_lock, write_atomically

if TYPE_CHECKING:
    from nemo_grpo.run.trackers import Ended, Tracker

log = logging.getLogger(__name__)

VERSIONS_FILE = "versions.json"
"""File in a run's folder: versions of the packages at the run's last start."""
SIDE_FOLDER = Path("policy/tokenizer")
"""Folder in a checkpoint with config.json, tokenizer and chat template, for the converters' --hf-config."""
PACKAGES = (
    "nemo-grpo",
    "torch",
    "megatron-core",
    "transformers",
    "transformer-engine",
    "vllm",
    "nemo-rl",
    "megatron-bridge",
    "ray",
    "safetensors",
)
"""Packages whose versions a run records, if they are installed."""


class RunFolder:
    """The folder of a run.

    Only the leading process writes, and only after `open`.

    Attributes:
        failure: The reason why a row could not be appended, or None. After a failure no more rows are
            appended, and the run should end.
    """

    def __init__(
        self, path: Path, *, checkpoints: Path | None = None, leads: bool = True, resume: bool = False
    ) -> None:
        """Name the files of the folder. Nothing is created yet.

        Args:
            path: Folder of the run.
            checkpoints: Folder of the checkpoints. Outside of ``path`` it gets a lock of its own, so that no
                other run uses it at the same time.
            leads: True on the process that writes.
            resume: True if the run continues.
        """
        self.path = path
        self.checkpoints: Path | None = None
        if checkpoints is not None and not checkpoints.is_relative_to(path):
            self.checkpoints = checkpoints
        self.resume = resume
        self.leads = leads
        self.metrics = path / "metrics.jsonl"
        self.samples = path / "samples.jsonl"
        self.diagnostics = path / "diagnostics.jsonl"
        self.hf = path / "hf"
        self.hf_adapter = path / "hf-adapter"
        self.recipe = path / RECIPE_FILE
        self.failure: str | None = None
        self._trackers: list[Tracker] = []
        self._locks: dict[Path, int] = {}

    def lock(self) -> None:
        """Lock those of the run's folders that exist already; `close` unlocks them.

        If such a folder lies within another run's, that one is locked, too: ``runs/a`` for checkpoints in
        ``runs/a/checkpoints``.
        """
        if not self.leads:
            return
        folders = self._folders()
        enclosing_runs = [
            parent for folder in folders for parent in folder.parents if (parent / RECIPE_FILE).exists()
        ]
        for folder in folders + enclosing_runs:
            if folder.is_dir() and folder not in self._locks:
                self._locks[folder] = _locked(folder)

    def _folders(self) -> list[Path]:
        """List the run's folder, and the folder of its checkpoints if that lies elsewhere."""
        return [self.path] if self.checkpoints is None else [self.path, self.checkpoints]

    def check(self) -> None:
        """Refuse a folder that this run may not use, before anything is created."""
        if self.path.exists() and not self.resume:
            raise UserError(
                f"run folder {self.path} exists; add --resume to continue it, or choose another "
                "nemo_grpo.run_name"
            )
        parent = existing_parent(self.path)
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise UserError(
                f"run folder {self.path} cannot be created: {parent} is not a writable folder; "
                "choose another nemo_grpo.runs_dir"
            )
        self._refuse_checkpoints()

    def _refuse_checkpoints(self) -> None:
        """Refuse to begin a run in a folder of checkpoints that another run has used."""
        if not self.resume and self.checkpoints is not None and checkpoints_in(self.checkpoints):
            raise UserError(
                f"checkpointing.checkpoint_dir={self.checkpoints} holds another run's checkpoints; add "
                "--resume to continue it, or choose another folder"
            )

    def open(
        self,
        recipe_yaml: str,
        own_files: Mapping[str, str] = MappingProxyType({}),
        *,
        from_step: int,
        trackers: Callable[[Path], Iterable[Tracker]] = lambda _folder: (),
    ) -> None:
        """Create or continue the folder, and open the trackers.

        Rows of steps after ``from_step`` are dropped, because these steps are trained again.

        Args:
            recipe_yaml: The resolved recipe.
            own_files: Texts of the user's own code, see `Recipe.own_files`.
            from_step: Step of the checkpoint that the run continues from; -1 without a checkpoint.
            trackers: Function that opens the trackers in the folder that it is called with.
        """
        if not self.leads:
            return
        self.lock()
        # Another run may have saved, and ended, since `check`.
        self._refuse_checkpoints()
        try:
            # Two runs of one name may both have passed `check`; only one of them makes the folder.
            self.path.mkdir(parents=True, exist_ok=self.resume)
            if self.checkpoints is not None:
                self.checkpoints.mkdir(parents=True, exist_ok=True)
            # Lock once more, now that the new folders exist.
            self.lock()
            self.begin_record(recipe_yaml, own_files, from_step)
        except FileExistsError:
            raise UserError(
                f"run folder {self.path} was created by another run just now; choose another name"
            ) from None
        except OSError as error:
            raise UserError(f"run folder {self.path} cannot be written: {error.strerror}") from None
        self._trackers = list(trackers(self.path))

    def begin_record(self, recipe_yaml: str, own_files: Mapping[str, str], from_step: int) -> None:
        """Write the run's settings, and drop the rows that it will write again.

        Both engines call it before they append a row.
        """
        self.keep_settings(recipe_yaml, own_files, from_step)
        self.drop_abandoned_rows(from_step)

    def drop_abandoned_rows(self, from_step: int) -> None:
        """Remove the rows of steps after the checkpoint that the run continues from.

        These steps are trained again. With the old rows a report would show rewards and accuracies of a
        policy that no longer exists.

        Args:
            from_step: Step of the checkpoint; -1 without one: all rows then move to ``*.old.jsonl``.
        """
        row_files = [path for path in (self.metrics, self.samples, self.diagnostics) if path.exists()]
        if row_files and from_step < 0:
            log.warning("no checkpoint: the run begins anew; what it logged before is in *.old.jsonl")
        for path in row_files:
            if from_step < 0:
                with path.with_suffix(".old.jsonl").open("a") as old:
                    old.write(path.read_text())
                path.unlink()
            else:
                _keep_rows_up_to(path, from_step)

    def keep_settings(self, recipe_yaml: str, own_files: Mapping[str, str], from_step: int) -> None:
        """Write the versions, the resolved recipe and the user's own code.

        If the user's code has changed, that is logged, and a copy of the old text stays.
        """
        # Checkpoints that lie elsewhere get the recipe, too: whoever resumes from them needs it.
        for folder in self._folders():
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / VERSIONS_FILE, json.dumps(versions(), indent=2) + "\n")
            write_atomically(folder / RECIPE_FILE, recipe_yaml)
        for name, text in own_files.items():
            copy = own_copy(self.path, name)
            copy.parent.mkdir(exist_ok=True)
            if from_step >= 0 and copy.is_file() and copy.read_bytes() != text.encode():
                old_copy = copy.replace(copy.with_name(f"{copy.name}.until_step_{from_step}"))
                message = "%s has changed: its new code runs from step %d on; %s has the old"
                log.warning(message, name, from_step + 1, old_copy)
            write_atomically(copy, text)

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Add the row of one step to metrics.jsonl, and log it to the trackers. NaN and inf become null."""
        if not self.leads:
            return
        self._append(self.metrics, row)
        numbers = {name: value for name, value in row.items() if name != "step"}
        for tracker in self._trackers:
            tracker.log(numbers, row["step"])

    def close(self, ended: Ended = "FAILED") -> None:
        """Flush and close the trackers, and unlock the folder."""
        for tracker in self._trackers:
            tracker.close(ended)
        self._trackers = []
        for descriptor in self._locks.values():
            os.close(descriptor)
        self._locks = {}

    def append_samples(self, rows: list[dict[str, Any]]) -> None:
        """Add rows to samples.jsonl."""
        for row in rows:
            self._append(self.samples, row)

    def append_diagnostics(self, row: dict[str, Any]) -> None:
        """Add a row to diagnostics.jsonl."""
        self._append(self.diagnostics, row)

    def _append(self, path: Path, row: dict[str, Any]) -> None:
        """Add a row to a file, unless an earlier row could not be written: the files would have gaps."""
        if not self.leads or self.failure:
            return
        try:
            with path.open("a") as file:
                file.write(json.dumps(_finite(row), allow_nan=False) + "\n")
        except OSError as error:
            self.failure = f"{path} cannot be written ({error.strerror or error})"
            log.error("%s; the run ends after this step", self.failure)


def _locked(folder: Path) -> int:
    """Lock a folder, and return the descriptor that holds the lock until it is closed."""
    descriptor = os.open(folder / ".lock", os.O_CREAT | os.O_WRONLY)
    refusal = f"folder {folder} is in use by another run; wait for it or end it"
    try:
        hold_lock(descriptor, refusal, per_process=True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def own_copy(folder: Path, name: str) -> Path:
    """Return the path of the run folder's copy of a user's own file: ``own/a%2Fb.py`` for ``a/b.py``."""
    return folder / "own" / quote(name, safe="")


def checkpoints_in(folder: Path) -> list[Path]:
    """List the checkpoints that either engine wrote, from the first step to the last."""
    # The whole name must match: other programs or a killed save may leave step_3.json or tmp_step_3 there.
    checkpoints = [path for path in folder.glob("step_*") if re.fullmatch(r"step_\d+", path.name)]
    return sorted(checkpoints, key=step_of)


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint in a folder, or None if it has none."""
    checkpoints = checkpoints_in(folder)
    return checkpoints[-1] if checkpoints else None


def step_of(checkpoint: Path) -> int:
    """Return the number of the step after which this checkpoint was written."""
    return int(checkpoint.name.removeprefix("step_"))


def versions() -> dict[str, str]:
    """Return the versions of Python, the platform and the packages that a result depends on."""
    by_name = {"python": sys.version.split()[0], "platform": platform.platform()}
    for package in PACKAGES:
        try:
            by_name[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return by_name


def _finite(value: Any) -> Any:
    """Replace NaN and inf, which JSON cannot express, by None, also within nested values."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _keep_rows_up_to(path: Path, last_step: int) -> None:
    """Rewrite a file of rows without the rows of later steps, and without damaged lines."""
    lines = path.read_text(errors="replace").splitlines()
    steps = [_step_of(line) for line in lines]
    # A damaged last line is not counted: the run was killed while it wrote that line.
    num_damaged = steps[:-1].count(None)
    if num_damaged:
        log.warning("%s: %d damaged lines are left out", path, num_damaged)
    rows = [line for line, step in zip(lines, steps, strict=True) if step is not None and step <= last_step]
    write_atomically(path, "".join(f"{line}\n" for line in rows))


def _step_of(line: str) -> float | None:
    """Return the step of a row, or None if the line is damaged."""
    try:
        return float(json.loads(line)["step"])
    except (*UNREADABLE, LookupError, TypeError):
        return None
