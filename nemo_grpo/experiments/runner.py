"""Run jobs, several at a time, each in its own process; finished jobs are not repeated."""

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Literal

from nemo_grpo.engine.input_hashes import check_inputs, model_files
from nemo_grpo.engine.resume import PLACES, check_same_run
from nemo_grpo.engine.signals import EXIT_INTERRUPTED, StopRequest, stop_on_signals
from nemo_grpo.experiments.jobs import RUNS, Job
from nemo_grpo.recipe.loader import load_tree
from nemo_grpo.recipe.recipe import RECIPE_FILE
from nemo_grpo.support.errors import UserError, how_ended
from nemo_grpo.support.files import hold_lock, write_atomically
from nemo_grpo.support.progress import progress

log = logging.getLogger(__name__)

STATUS = "status.json"
LOGS = "logs"
POLL_SECONDS = 0.5
ANOTHER_OUT = "choose another --out"
ENDED_BY_SIGTERM = (-signal.SIGTERM, 128 + signal.SIGTERM)
"""Codes of a run, and of the launcher of its ranks, that had nothing to save yet."""


@dataclass(frozen=True)
class Status:
    """The end of a run.

    Attributes: exit_code: of its last process.  error: the last words of a failed run.
    """

    state: Literal["finished", "failed", "interrupted"]
    exit_code: int
    error: str = ""


def train_command(job: Job) -> list[str]:
    """The command that runs a job, or resumes it, to its end."""
    start = [sys.executable, "-m", "nemo_grpo.cli.child"]
    return [*start, "train", str(job.setting.recipe), *job.overrides, "--resume"]


def run_jobs(
    jobs: Sequence[Job], out: Path, num_parallel: int = 1, command: Callable[[Job], list[str]] = train_command
) -> dict[str, Status]:
    """Run unfinished jobs, ``num_parallel`` at a time, and record in ``out/status.json`` how each ended.

    An unfinished run is resumed from its newest checkpoint. A run that fails does not stop the others. The
    first signal to stop is passed on; every run then saves a checkpoint.

    Args:    jobs: that `check_unchanged` accepts.
             command: makes the process of a job; exit codes as of ``nemo-grpo train``.
    Returns: job's name -> how it ended, in the order of ``jobs``; not those that a signal kept from starting.
    Raises:  UserError: the folder cannot be written, or another process runs jobs in it.
    """
    with only_one(out):
        ended = _read_status(out)
        waiting = [job for job in jobs if not _is_finished(job, ended)]
        if len(waiting) < len(jobs):
            log.info("%d of %d runs are already finished", len(jobs) - len(waiting), len(jobs))
        for job in waiting:
            if job.name in ended and ended[job.name].state == "finished":  # with another recipe
                ended[job.name] = Status("interrupted", EXIT_INTERRUPTED)
        for name, status in _ends(waiting, out, num_parallel, command):
            ended[name] = status
            states = {name: asdict(status) for name, status in ended.items()}
            write_atomically(out / STATUS, json.dumps(states, indent=2) + "\n")
        return {job.name: ended[job.name] for job in jobs if job.name in ended}


def _ends(
    waiting: Sequence[Job], out: Path, num_parallel: int, command: Callable[[Job], list[str]]
) -> Iterator[tuple[str, Status]]:
    """Run jobs in threads, each of which waits for a process.  Yields: (name, how it ended), as they end."""
    if not waiting:
        return
    running: dict[str, subprocess.Popen[bytes]] = {}
    told: set[str] = set()
    first = last = sum(map(steps_done, waiting))
    total = max(sum(job.recipe.grpo.max_num_steps for job in waiting), first + 1)
    pool = ThreadPoolExecutor(num_parallel)
    with stop_on_signals() as stop, progress("steps of all runs", total, done=first) as advance:
        pending = {pool.submit(_run, job, out, command(job), running, stop): job.name for job in waiting}
        try:
            while pending:
                for future in wait(pending, POLL_SECONDS, FIRST_COMPLETED).done:
                    name, status = pending.pop(future), future.result()
                    if status is not None:
                        yield name, status
                for name, process in list(running.items()) if stop else ():
                    if name not in told:  # a second signal would end it without a checkpoint
                        process.terminate()
                    told.add(name)
                note = f"{len(waiting) - len(pending)} of {len(waiting)} runs ended"
                note += f", running {', '.join(running)}" if running else ""
                now = max(last, sum(map(steps_done, waiting)))
                advance(note, now - last)
                last = now
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(running.values()):
                process.terminate()


def _run(
    job: Job,
    out: Path,
    command: Sequence[str],
    running: dict[str, subprocess.Popen[bytes]],
    stop: StopRequest,
) -> Status | None:
    """Run a job's process to its end.  Returns: how it ended; None if it was not to start any more."""
    if stop:
        return None
    words = out / LOGS / f"{job.name}.log"
    with (
        words.open("wb") as log_file,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # it ends when this process does, see `child`
            stdout=log_file,
            stderr=log_file,
            start_new_session=True,
        ) as process,
    ):
        running[job.name] = process
        code = process.wait()
        del running[job.name]
    if code == 0:
        log.info("finished %s", job.name)
        return Status("finished", 0)
    if code in (EXIT_INTERRUPTED, *ENDED_BY_SIGTERM):
        return Status("interrupted", code)
    error = _last_words(words)
    log.error("%s failed (%s): %s", job.name, how_ended(code), error)
    return Status("failed", code, error)


def check_unchanged(jobs: Sequence[Job]) -> None:
    """Refuse runs that were trained or validated otherwise before: a mean is of like runs.

    More steps are allowed where learning rate and weight decay do not depend on their number.

    Raises: UserError: naming the run, and the keys with both values or the file that has changed.
    """
    model_of = cache(model_files)  # says once what it leaves out
    for job in jobs:
        schedule = job.recipe.policy.megatron_cfg.scheduler
        constant = schedule.lr_decay_style == schedule.weight_decay_incr_style == "constant"
        extends = constant or schedule.lr_decay_iters is not None
        may_change = (*PLACES, "grpo.max_num_steps") if extends else PLACES
        check_same_run(job.recipe, job.folder / RECIPE_FILE, may_change, ANOTHER_OUT)
        if job.recipe.policy.model_name is not None:
            check_inputs(job.folder, model_of(Path(job.recipe.policy.model_name)), ANOTHER_OUT)
        if (done := steps_done(job)) > job.recipe.grpo.max_num_steps:
            raise UserError(
                f"grpo.max_num_steps={job.recipe.grpo.max_num_steps}: {job.folder} has made {done} steps; "
                f"raise it, or {ANOTHER_OUT}"
            )


def _is_finished(job: Job, ended: dict[str, Status]) -> bool:
    """True if the run finished, and is not to make more steps than it was then."""
    resolved = job.folder / RECIPE_FILE
    if job.name not in ended or ended[job.name].state != "finished" or not resolved.is_file():
        return False
    same = resolved.read_text() == job.recipe.to_yaml()
    return same or load_tree(resolved)["grpo"]["max_num_steps"] >= job.recipe.grpo.max_num_steps


def steps_done(job: Job) -> int:
    """The last step in the run's metrics; reads only the file's end, as it is polled twice a second."""
    try:
        with (job.folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 20_000))
            lines = file.read().splitlines()
        return max(
            (int(json.loads(line).get("step", 0)) for line in lines[-2:] if line.endswith(b"}")), default=0
        )
    except (OSError, ValueError):
        return 0


def _last_words(path: Path) -> str:
    """The error line of a run's output, or its last line."""
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    return (errors or lines or ["no output"])[-1]


def _read_status(out: Path) -> dict[str, Status]:
    try:
        found = json.loads((out / STATUS).read_text())
        kept = [field.name for field in fields(Status)]  # an older version wrote more
        return {name: Status(**{key: status[key] for key in kept}) for name, status in found.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.warning("%s cannot be read (%s); every run is checked again", out / STATUS, error)
        return {}


@contextmanager
def only_one(out: Path) -> Iterator[None]:
    """Make the experiment's folder and hold its lock.

    Raises: UserError: it cannot be written, or another process has it.
    """
    try:
        for folder in (out / RUNS, out / LOGS):
            folder.mkdir(parents=True, exist_ok=True)
        lock = (out / ".lock").open("w")
    except OSError as error:
        raise UserError(f"--out {out} cannot be written ({error.strerror}); choose another folder") from None
    with lock:
        refusal = f"--out {out} is in use by another process; wait for it or end it"
        hold_lock(lock, refusal, per_process=True)
        yield
