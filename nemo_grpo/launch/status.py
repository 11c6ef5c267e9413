"""How a run's jobs stand, from their log folder and from Slurm."""

import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

from nemo_grpo.errors import UserError, did_you_mean
from nemo_grpo.recipe.own import FOLDER_NAME

FIELDS = ("JobState", "Reason", "RunTime", "TimeLimit", "NodeList", "Restarts", "ExitCode")


@dataclass(frozen=True)
class Attempt:
    """A row of attempts.tsv, as slurm/lib/retry.sh writes it."""

    number: str
    time: str
    cause: str
    exit_code: str
    step_at_start: str
    step_at_end: str
    decision: str


@dataclass(frozen=True)
class Status:
    """Attributes: job: number.  logs: of its newest attempt; None: it has not started.
    slurm: fields that Slurm knows; empty when it has forgotten the job.  attempts: those that have ended.
    step: newest checkpoint, None: unknown.  last_lines: of the driver.
    """

    job: str
    logs: Path | None
    slurm: dict[str, str]
    attempts: tuple[Attempt, ...]
    step: int | None
    last_lines: tuple[str, ...]


def status_of(run: str, logs: Path, num_lines: int = 5) -> Status:
    """Look up the newest job of a run.

    Args:   run: the job's name, or its number.  logs: the folder above.
    Raises: UserError: neither the logs nor Slurm know such a run.
    """
    if not re.fullmatch(FOLDER_NAME, run, re.ASCII):
        raise UserError(f"{run!r} is no name of a run, and no number of a job")
    folder, queued = _find(run, logs), _queued(run)
    job = folder.parent.name if folder else ""
    if queued and int(queued) > int(job or 0):
        return Status(queued, None, _ask_slurm(queued), (), None, ())
    if folder is None:
        known = [path.parent.name for path in logs.glob("*/latest")]
        raise UserError(
            f"no job of {run!r} has logs in {logs}, nor is one queued; name the folder by --logs"
            f"{did_you_mean(run, known)}"
        )
    driver = folder / "driver.log"
    lines = driver.read_text(errors="replace").splitlines() if driver.exists() else []
    return Status(
        job=job,
        logs=folder,
        slurm=_ask_slurm(job),
        attempts=_attempts(folder.parent / "attempts.tsv"),
        step=_newest_step(folder / "settings.sh"),
        last_lines=tuple(lines[-num_lines:]),
    )


def _find(run: str, logs: Path) -> Path | None:
    """The folder of the newest attempt; None: there is none."""
    if run.isdigit():
        attempts = [path for path in logs.glob(f"*/{run}/attempt-*") if path.is_dir()]
        if attempts:
            return max(attempts, key=lambda path: int(path.name.removeprefix("attempt-")))
    latest = logs / run / "latest"
    return latest.resolve() if latest.is_dir() else None


def _queued(run: str) -> str | None:
    """The newest job of a run, or this job, among the user's jobs that have not ended."""
    rows = (
        line.split("|", 1) for line in _slurm("squeue", "--me", "--noheader", "--format=%A|%j").splitlines()
    )
    return max((job for job, name in rows if run in (job, name)), key=int, default=None)


def _attempts(path: Path) -> tuple[Attempt, ...]:
    rows = path.read_text().splitlines() if path.exists() else []
    return tuple(Attempt(*row.split("\t")) for row in rows)


def _ask_slurm(job: str) -> dict[str, str]:
    pairs = [
        item.split("=", 1) for item in _slurm("scontrol", "show", "job", job, "-o").split() if "=" in item
    ]
    return {key: value for key, value in pairs if key in FIELDS}


def _slurm(*command: str) -> str:
    """Output of one of Slurm's programs; empty if it is not here or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _newest_step(settings: Path) -> int | None:
    found = re.search(r"^CHECKPOINT_DIR=(.*)$", settings.read_text(), re.M) if settings.exists() else None
    if found is None:
        return None
    names = [path.name for path in Path(shlex.split(found[1])[0]).glob("step_*")]
    return max((int(name.removeprefix("step_")) for name in names if name[5:].isdigit()), default=0)
