"""Runs of an experiment on this machine, several at a time; runs that are complete are skipped."""

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from nemo_grpo.engine.checks import check_machine
from nemo_grpo.experiments.jobs import RUNS, Job, Status, naming, one_per_setting
from nemo_grpo.experiments.results import Results, baseline_of, is_complete, write_results
from nemo_grpo.recipe.recipe import RECIPE_FILE
from nemo_grpo.run.continuation import check_inputs, check_same_run, model_files
from nemo_grpo.run.recipe_checks import check_recipe, remedies
from nemo_grpo.run.signals import EXIT_INTERRUPTED
from nemo_grpo.support.errors import UserError, how_ended
from nemo_grpo.support.files import hold_lock
from nemo_grpo.support.progress import progress

log = logging.getLogger(__name__)

LOGS = "logs"
ANOTHER_OUT = "choose another --out"


def run_experiment(
    jobs: Sequence[Job], out: Path, *, num_parallel: int, command: str, baseline: str | None = None
) -> tuple[Results, int]:
    """Run the jobs and write the results.

    Args:    out: folder of everything.  command: this command line, for the record.
             baseline: see `results.baseline_of`.
    Returns: the results; exit code 0 if every run is finished, 75 if Ctrl-C stopped some, else 1.
    Raises:  UserError: before any run starts.
    """
    baseline = baseline_of(jobs, baseline)
    if missing := check_settings(jobs):
        raise UserError("; ".join(remedies(missing)))
    check_unchanged(jobs)
    ended = run_jobs(jobs, out, num_parallel)
    results = write_results(jobs, ended, out, command, baseline=baseline)
    states = {ended[job.name].state if job.name in ended else "interrupted" for job in jobs}
    if "failed" in states:
        return results, 1
    return results, EXIT_INTERRUPTED if "interrupted" in states else 0


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
    """Run the jobs that are not complete, ``num_parallel`` at a time, each in a process of its own.

    A run that was interrupted resumes from its newest checkpoint. A run that fails does not stop the others.
    Ctrl-C reaches the runs, too, as they are in the terminal's process group: they save and end, and no other
    starts. If this process is ended otherwise, they notice (`cli.child`).

    Args:    jobs: accepted by `check_unchanged`.
             command: makes the command of a job; exit codes as of ``nemo-grpo train``.
    Returns: job's name -> status, in the order of ``jobs``; without jobs that were not started.
    """
    with only_one(out):
        ended = {job.name: Status("finished", 0) for job in jobs if is_complete(job)}
        if ended:
            log.info("%d of %d runs are already finished", len(ended), len(jobs))
        log_files = {job.name: out / LOGS / f"{job.name}.log" for job in jobs}
        executor = ThreadPoolExecutor(num_parallel)
        runs: dict[Future[int], str] = {
            executor.submit(_run, command(job), log_files[job.name]): job.name
            for job in jobs
            if job.name not in ended
        }
        try:
            with progress("runs", len(jobs), done=len(ended)) as advance:
                for run in as_completed(runs):
                    name = runs[run]
                    ended[name] = _status(name, run.result(), log_files[name])
                    advance(f"{name} {ended[name].state}", 1)
        except KeyboardInterrupt:
            log.warning("no other run starts; those that run save a checkpoint and end")
            executor.shutdown(cancel_futures=True)
            for run, name in runs.items():
                if name not in ended and not run.cancelled():  # however a run ends that was starting
                    code = run.result()
                    ended[name] = Status("interrupted", code) if code else Status("finished", 0)
        finally:
            executor.shutdown(cancel_futures=True)
        return {job.name: ended[job.name] for job in jobs if job.name in ended}


def _run(command: Sequence[str], log_file: Path) -> int:
    """Run a job's process to its end; its standard input ends if this process does (`cli.child`)."""
    with (
        log_file.open("wb") as file,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=file, stderr=file) as process,
    ):
        return process.wait()


def _status(name: str, code: int, log_file: Path) -> Status:
    if code == 0:
        return Status("finished", 0)
    if code == EXIT_INTERRUPTED:
        return Status("interrupted", code)
    lines = [line.strip() for line in log_file.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    error = (errors or lines or ["no output"])[-1]
    log.error("%s failed (%s): %s", name, how_ended(code), error)
    return Status("failed", code, error)


def check_unchanged(jobs: Sequence[Job]) -> None:
    """Refuse runs that were trained or validated differently before, because a mean needs like runs."""
    model_of = cache(model_files)  # logs the files that it skips once
    for job in jobs:
        check_same_run(job.recipe, job.folder / RECIPE_FILE, ANOTHER_OUT, may_extend=False)
        if job.recipe.policy.model_name is not None:
            check_inputs(job.folder, model_of(Path(job.recipe.policy.model_name)), ANOTHER_OUT)


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
