"""A run's newest job, from its log folder and from Slurm."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

from nemo_grpo.recipe.own import FOLDER_NAME
from nemo_grpo.support.errors import UserError, did_you_mean

FIELDS = ("JobState", "Reason", "RunTime", "TimeLimit", "NodeList", "Restarts", "ExitCode")
ATTEMPT = "  attempt {}, ended {}: {}, exit code {}, checkpoints {} -> {}, {}"
"""A row of attempts.tsv, whose columns slurm/lib/retry.sh writes."""


def status_of(run: str, logs: Path, num_lines: int = 5) -> list[str]:
    """Describe the newest job of a run, a line for each thing that is known.

    Args: run: the job's name, or its number.  logs: the folder above.  num_lines: last ones of the driver.
    """
    if not re.fullmatch(FOLDER_NAME, run, re.ASCII):
        raise UserError(f"{run!r} is no name of a run, and no number of a job")
    folder, queued = _find(run, logs), _queued(run)
    job = folder.parent.name if folder else ""
    if queued and int(queued) > int(job or 0):
        return [_state_of(queued), "  logs: none yet"]
    if folder is None:
        known = [path.parent.name for path in logs.glob("*/latest")]
        raise UserError(
            f"no job of {run!r} has logs in {logs}, nor is one queued; name the folder by --logs"
            f"{did_you_mean(run, known)}"
        )
    return [_state_of(job), *_attempts(folder), *_newest_step(folder), *_end_of_log(folder, num_lines)]


def _find(run: str, logs: Path) -> Path | None:
    if run.isdigit():
        attempts = [path for path in logs.glob(f"*/{run}/attempt-*") if path.is_dir()]
        if attempts:
            return max(attempts, key=lambda path: int(path.name.removeprefix("attempt-")))
    latest = logs / run / "latest"
    return latest.resolve() if latest.is_dir() else None


def _queued(run: str) -> str | None:
    queue = _slurm("squeue", "--me", "--noheader", "--format=%A|%j")
    rows = (line.split("|", 1) for line in queue.splitlines())
    return max((job for job, name in rows if run in (job, name)), key=int, default=None)


def _state_of(job: str) -> str:
    shown = _slurm("scontrol", "show", "job", job, "-o").split()
    pairs = [item.split("=", 1) for item in shown if "=" in item]
    known = [f"{key} {value}" for key, value in pairs if key in FIELDS and value not in ("", "None")]
    return f"job {job}: {', '.join(known) or 'Slurm does not know it'}"


def _attempts(folder: Path) -> Iterator[str]:
    table = folder.parent / "attempts.tsv"
    for row in table.read_text().splitlines() if table.exists() else ():
        yield ATTEMPT.format(*row.split("\t"))


def _newest_step(folder: Path) -> Iterator[str]:
    settings = folder / "settings.sh"
    found = re.search(r"^CHECKPOINT_DIR=(.*)$", settings.read_text(), re.M) if settings.exists() else None
    if found is not None:
        names = [path.name.removeprefix("step_") for path in Path(shlex.split(found[1])[0]).glob("step_*")]
        step = max((int(name) for name in names if name.isdigit()), default=0)
        yield f"  newest checkpoint: {f'step {step}' if step else 'none'}"


def _end_of_log(folder: Path, num_lines: int) -> Iterator[str]:
    yield f"  logs: {folder}"
    driver = folder / "driver.log"
    lines = driver.read_text(errors="replace").splitlines() if driver.exists() else []
    yield from (f"  | {line}" for line in lines[-num_lines:])


def _slurm(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
