"""Runs jobs, several at a time, each in its own process; finished jobs are not repeated."""

import json
import logging
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path

from nemo_grpo.engine.checks import check_machine
from nemo_grpo.engine.recipe_checks import check_recipe, remedies
from nemo_grpo.engine.resume import PLACES, check_inputs, check_same_run, model_files
from nemo_grpo.engine.signals import EXIT_INTERRUPTED, stop_on_signals
from nemo_grpo.experiments.jobs import RUNS, Job, Status, naming, one_per_setting
from nemo_grpo.experiments.results import Results, baseline_of, write_results
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
"""Exit codes of a run and of the launcher of its ranks if SIGTERM came before there was anything to save."""


def run_experiment(
    jobs: Sequence[Job], out: Path, *, num_parallel: int, command: str, baseline: str | None = None
) -> tuple[Results, int]:
    """Run the jobs and write the results.

    Args:    out: folder of everything.  command: this command line, for the record.
             baseline: see `results.baseline_of`.
    Returns: the results; exit code 0 if every run is finished, 75 if a signal stopped some, else 1.
    Raises:  UserError: before any run starts.
    """
    baseline = baseline_of(jobs, baseline)
    if missing := check_settings(jobs):
        raise UserError("; ".join(remedies(missing)))
    check_unchanged(jobs)
    ended = run_jobs(jobs, out, num_parallel)
    found = write_results(jobs, ended, out, command, baseline=baseline)
    states = {ended[job.name].state if job.name in ended else "interrupted" for job in jobs}
    return found, 1 if "failed" in states else EXIT_INTERRUPTED if "interrupted" in states else 0


def check_settings(jobs: Sequence[Job]) -> list[str]:
    """Refuse settings that cannot be trained, checking one seed of each.

    Returns: missing files, see `recipe_checks.remedies`.
    """
    missing = list[str]()
    for job in one_per_setting(jobs):
        with naming(job.setting):
            check_machine(job.recipe)
            found = check_recipe(job.recipe, continues=False)
            found.refuse(missing=False)
        missing += found.missing
    return missing


def train_command(job: Job) -> list[str]:
    """Make the command that runs a job, or resumes it, to its end."""
    start = [sys.executable, "-m", "nemo_grpo.cli.child"]
    return [*start, "train", str(job.setting.recipe), *job.overrides, "--resume"]


def run_jobs(
    jobs: Sequence[Job], out: Path, num_parallel: int = 1, command: Callable[[Job], list[str]] = train_command
) -> dict[str, Status]:
    """Run unfinished jobs, ``num_parallel`` at a time, and record each one's status in ``out/status.json``.

    An unfinished run is resumed from its newest checkpoint. A run that fails does not stop the others. The
    first signal to stop is passed on; every run then saves a checkpoint.

    Args:    jobs: accepted by `check_unchanged`.
             command: makes the command of a job; exit codes as of ``nemo-grpo train``.
    Returns: job's name -> status, in the order of ``jobs``; without jobs that a signal kept from starting.
    """
    with only_one(out):
        ended = _read_status(out)
        waiting = [job for job in jobs if not _is_finished(job, ended)]
        if len(waiting) < len(jobs):
            log.info("%d of %d runs are already finished", len(jobs) - len(waiting), len(jobs))
        for job in waiting:
            if job.name in ended and ended[job.name].state == "finished":  # with fewer steps
                ended[job.name] = Status("interrupted", EXIT_INTERRUPTED)
        for name, status in _ends(waiting, out, num_parallel, command):
            ended[name] = status
            states = {name: asdict(status) for name, status in ended.items()}
            write_atomically(out / STATUS, json.dumps(states, indent=2) + "\n")
        return {job.name: ended[job.name] for job in jobs if job.name in ended}


def _ends(
    waiting: Sequence[Job], out: Path, num_parallel: int, command: Callable[[Job], list[str]]
) -> Iterator[tuple[str, Status]]:
    """Run jobs, each in a process; yields (name, status) as they end."""
    queue, running = deque(waiting), dict[str, subprocess.Popen[bytes]]()
    stopped, num_ended = set[str](), 0
    last = sum(map(steps_done, waiting))
    total = max(sum(job.recipe.grpo.max_num_steps for job in waiting), last + 1)
    with stop_on_signals() as stop, progress("steps of all runs", total, done=last) as advance:
        try:
            while running or (queue and not stop):
                while queue and not stop and len(running) < num_parallel:
                    job = queue.popleft()
                    running[job.name] = _started(command(job), out / LOGS / f"{job.name}.log")
                with suppress(subprocess.TimeoutExpired):
                    next(iter(running.values())).wait(POLL_SECONDS)
                for name, process in list(running.items()):
                    if process.poll() is not None:
                        running.pop(name).communicate()
                        num_ended += 1
                        yield name, _status(name, process.returncode, out)
                    elif stop and name not in stopped:  # a second signal would end it without a checkpoint
                        process.terminate()
                        stopped.add(name)
                names = f", running {', '.join(running)}" if running else ""
                now = max(last, sum(map(steps_done, waiting)))
                advance(f"{num_ended} of {len(waiting)} runs ended{names}", now - last)
                last = now
        finally:
            for process in running.values():
                process.terminate()


def _started(command: Sequence[str], log_file: Path) -> subprocess.Popen[bytes]:
    """Start a job's process; it ends when its standard input closes, as this process ends (`cli.child`)."""
    with log_file.open("wb") as file:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=file, stderr=file, start_new_session=True
        )


def _status(name: str, code: int, out: Path) -> Status:
    if code == 0:
        log.info("finished %s", name)
        return Status("finished", 0)
    if code in (EXIT_INTERRUPTED, *ENDED_BY_SIGTERM):
        return Status("interrupted", code)
    text = (out / LOGS / f"{name}.log").read_text(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    error = (errors or lines or ["no output"])[-1]
    log.error("%s failed (%s): %s", name, how_ended(code), error)
    return Status("failed", code, error)


def check_unchanged(jobs: Sequence[Job]) -> None:
    """Refuse runs that were trained or validated differently before, because a mean needs like runs.

    More steps are allowed if learning rate and weight decay do not depend on their number.
    """
    model_of = cache(model_files)  # logs the files that it skips once
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
    """True if the run finished, and the recipe now asks for no more steps."""
    resolved = job.folder / RECIPE_FILE
    if job.name not in ended or ended[job.name].state != "finished" or not resolved.is_file():
        return False
    return bool(load_tree(resolved)["grpo"]["max_num_steps"] >= job.recipe.grpo.max_num_steps)


def steps_done(job: Job) -> int:
    """Find the last step in the run's metrics; reads only the file's end, because it is polled often."""
    try:
        with (job.folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 20_000))
            lines = file.read().splitlines()[-2:]
        steps = (int(json.loads(line).get("step", 0)) for line in lines if line.endswith(b"}"))
        return max(steps, default=0)
    except (OSError, ValueError):
        return 0


def _read_status(out: Path) -> dict[str, Status]:
    try:
        found = json.loads((out / STATUS).read_text())
        return {name: Status(**status) for name, status in found.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        log.warning("%s cannot be read (%s); every run is checked again", out / STATUS, error)
        return {}


@contextmanager
def only_one(out: Path) -> Iterator[None]:
    """Make the experiment's folder and hold its lock."""
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
