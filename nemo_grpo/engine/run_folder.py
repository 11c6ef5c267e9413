"""``runs/<name>/``: everything that a run leaves behind.

recipe.resolved.yaml  own/  versions.json  metrics.jsonl  samples.jsonl  diagnostics.jsonl  tensorboard/
plots/  report.html  checkpoints/  evaluation/  hf/  hf-adapter/
"""

from __future__ import annotations

import errno
import fcntl
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

from nemo_grpo.errors import UserError
from nemo_grpo.files import write_atomically

if TYPE_CHECKING:
    from nemo_grpo.engine.trackers import Tracker

log = logging.getLogger(__name__)

_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
"""Lustre without -o flock, NFS without a lock daemon."""
VERSIONS_FILE = "versions.json"
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


class RunFolder:
    """A run's folder; nothing is written before `open`, and nothing by a process that does not lead."""

    def __init__(self, path: Path, *, leads: bool = True, resume: bool = False) -> None:
        self.path = path
        self.resume = resume
        self.leads = leads
        self.metrics = path / "metrics.jsonl"
        self.samples = path / "samples.jsonl"
        self.diagnostics = path / "diagnostics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.hf = path / "hf"
        self.hf_adapter = path / "hf-adapter"
        self.recipe = path / "recipe.resolved.yaml"
        self._trackers: list[Tracker] = []
        self._lock_file: int | None = None

    def _lock(self) -> None:
        """One process trains in a folder. The lock ends with this process; its children do not inherit it."""
        self._lock_file = os.open(self.path / ".lock", os.O_CREAT | os.O_WRONLY)
        try:
            fcntl.lockf(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise UserError(
                f"run folder {self.path} is in use by another process; wait for it or end it"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            log.warning("no locks in %s (%s): start no other run there", self.path, error.strerror)

    def check(self, *, resume: bool) -> None:
        """Refuse a folder that this run may not use, before anything is created.

        Raises: UserError: it exists and ``resume`` is False, or it cannot be written.
        """
        if self.path.exists() and not resume:
            raise UserError(
                f"run folder {self.path} exists; add --resume to continue it, or choose another "
                "nemo_grpo.run_name"
            )
        parent = self.path
        while not parent.exists():
            parent = parent.parent
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise UserError(
                f"run folder {self.path} cannot be created: {parent} is not a writable folder; "
                "choose another nemo_grpo.runs_dir"
            )

    def open(
        self,
        recipe_yaml: str,
        own_files: Mapping[str, str] = MappingProxyType({}),
        *,
        from_step: int,
        trackers: Callable[[Path], Iterable[Tracker]] = lambda _folder: (),
    ) -> None:
        """Create or continue the folder; rows of steps after ``from_step`` go: they will come again.

        Args: own_files: `Recipe.own_files`.  trackers: opens them, given this folder.
        """
        if not self.leads:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=self.resume)
            self._lock()
            write_atomically(self.path / VERSIONS_FILE, json.dumps(versions(), indent=2) + "\n")
            write_atomically(self.recipe, recipe_yaml)
            keep_own_files(self.path, own_files)
        except FileExistsError:
            raise UserError(
                f"run folder {self.path} was created by another run just now; choose another name"
            ) from None
        except OSError as error:
            raise UserError(f"run folder {self.path} cannot be written: {error.strerror}") from None
        rows = [path for path in (self.metrics, self.samples, self.diagnostics) if path.exists()]
        if rows and from_step < 0:
            log.warning("no checkpoint: the run begins anew; what it logged before is in *.old.jsonl")
        for path in rows:
            if from_step < 0:
                with path.with_suffix(".old.jsonl").open("a") as old:
                    old.write(path.read_text())
                path.unlink()
            else:
                _keep_rows_up_to(path, from_step)
        self._trackers = list(trackers(self.path))

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Add one step's object to metrics.jsonl; numbers that JSON has no name for become null."""
        if not self.leads:
            return
        _append(self.metrics, row)
        numbers = {name: value for name, value in row.items() if name != "step"}
        for tracker in self._trackers:
            tracker.log(numbers, row["step"])

    def close(self) -> None:
        """Flush and close the trackers, and give the folder free."""
        for tracker in self._trackers:
            tracker.close()
        self._trackers = []
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    def append_samples(self, rows: list[dict[str, Any]]) -> None:
        """Add responses to samples.jsonl."""
        for row in rows if self.leads else []:
            _append(self.samples, row)

    def append_diagnostics(self, row: dict[str, Any]) -> None:
        """Add one step's object to diagnostics.jsonl."""
        if self.leads:
            _append(self.diagnostics, row)


def own_copy(folder: Path, name: str) -> Path:
    """Where a run's folder keeps the file of a user's own variant, task or reward."""
    return folder / "own" / re.sub(r"[^\w.-]+", "_", name)


def keep_own_files(folder: Path, own_files: Mapping[str, str]) -> None:
    """Copies of `Recipe.own_files`: the resolved recipe alone would not say what ran."""
    for name, text in own_files.items():
        copy = own_copy(folder, name)
        copy.parent.mkdir(exist_ok=True)
        write_atomically(copy, text)


def versions() -> dict[str, str]:
    """Versions of Python, the platform and the packages that a result depends on."""
    found = {"python": sys.version.split()[0], "platform": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(_finite(row), allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    """The same, to any depth, with None for numbers that JSON has no name for."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _keep_rows_up_to(path: Path, step: int) -> None:
    kept = []
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:  # the line that was being written when the run was killed
            continue
        if row.get("step", 0) <= step:
            kept.append(line + "\n")
    write_atomically(path, "".join(kept))
