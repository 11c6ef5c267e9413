"""Experiments on this machine: runs of `nemo-grpo train`, several at a time, each in its own process."""

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

    Args:
        jobs: runs of all settings and seeds.
        out: folder of the experiment.
        num_parallel: number of runs at a time.
        command: this command line, which the results record.
        baseline: see `results.baseline_of`.

    Returns:
        The results, and the exit code: 0 if every run is finished, 75 if Ctrl-C stopped some, else 1.

    Raises:
        UserError: a setting is wrong; raised before any run starts.
    """
    # All checks come first, so that no setting is refused after hours of training others.
    baseline = baseline_of(jobs, baseline)
    missing_files = check_settings(jobs)
    if missing_files:
        raise UserError("; ".join(remedies(missing_files)))
    check_unchanged(jobs)
    ended = run_jobs(jobs, out, num_parallel)
    results = write_results(jobs, ended, out, command, baseline=baseline)
    states = [status.state for status in ended.values()]
    if "failed" in states:
        return results, 1
    # A run that Ctrl-C kept from starting has no status.
    if "interrupted" in states or len(ended) < len(jobs):
        return results, EXIT_INTERRUPTED
    return results, 0


def check_settings(jobs: Sequence[Job]) -> list[str]:
    """Refuse settings that cannot be trained. One seed of each setting is checked.

    Returns:
        Missing files, see `recipe_checks.remedies`.
    """
    missing_files = list[str]()
    for job in one_per_setting(jobs):
        with naming(job.setting):
            check_machine(job.recipe)
            findings = check_recipe(job.recipe, continues=False)
            findings.refuse(missing=False)
        missing_files += findings.missing
    return missing_files


def train_command(job: Job) -> list[str]:
    """Build the command that starts or resumes a job and runs it to its end."""
    start = [sys.executable, "-m", "nemo_grpo.cli.child"]
    return [*start, "train", str(job.setting.recipe), *job.overrides, "--resume"]


def run_jobs(
    jobs: Sequence[Job], out: Path, num_parallel: int = 1, command: Callable[[Job], list[str]] = train_command
) -> dict[str, Status]:
    """Run the jobs that are not complete, ``num_parallel`` at a time, each in its own process.

    A run that was interrupted resumes from its newest checkpoint. A run that fails does not stop the others.
    Ctrl-C also reaches the runs, because they belong to the terminal's process group. They save and end, and
    no further run starts. If this process ends in another way, its runs notice and stop too (`cli.child`).

    Args:
        jobs: runs that `check_unchanged` has accepted.
        out: folder of the experiment.
        num_parallel: number of runs at a time.
        command: builds the command of a job, whose exit codes must be those of ``nemo-grpo train``.

    Returns:
        Name of a job -> status, in the order of ``jobs``, without jobs that were not started.
    """
    with only_one(out):
        ended = {job.name: Status("finished", 0) for job in jobs if is_complete(job)}
        if ended:
            log.info("%d of %d runs are already finished", len(ended), len(jobs))
        log_files = {job.name: out / LOGS / f"{job.name}.log" for job in jobs}
        # Threads are enough, because each only waits for the process that it has started.
        executor = ThreadPoolExecutor(num_parallel)
        runs: dict[Future[int], str] = {}
        for job in jobs:
            if job.name not in ended:
                runs[executor.submit(_run, command(job), log_files[job.name])] = job.name
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
                if name in ended or run.cancelled():
                    continue
                code = run.result()
                # Ctrl-C can end a run that is still starting with any exit code, which is not a failure.
                ended[name] = Status("finished", 0) if code == 0 else Status("interrupted", code)
        finally:
            # Also after an error in this process; otherwise the executor would start the remaining runs.
            executor.shutdown(cancel_futures=True)
        return {job.name: ended[job.name] for job in jobs if job.name in ended}


def _run(command: Sequence[str], log_file: Path) -> int:
    """Run a job's process to its end and return its exit code.

    Its standard input is a pipe from this process, so the job notices if this process ends (`cli.child`).
    """
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
    error = _last_error(log_file)
    log.error("%s failed (%s): %s", name, how_ended(code), error)
    return Status("failed", code, error)


def _last_error(log_file: Path) -> str:
    """Return the last line of a log that begins with ``error:``, or else its last line."""
    lines = [line.strip() for line in log_file.read_text(errors="replace").splitlines()]
    lines = [line for line in lines if line]
    if not lines:
        return "no output"
    errors = [line for line in lines if line.startswith("error:")]
    return errors[-1] if errors else lines[-1]


def check_unchanged(jobs: Sequence[Job]) -> None:
    """Refuse to continue a run with a changed recipe or model: its steps could not enter one mean."""
    # Cached, because the runs share a model, and every call would log the files that it skips.
    files_of_model = cache(model_files)
    for job in jobs:
        check_same_run(job.recipe, job.folder / RECIPE_FILE, ANOTHER_OUT, may_extend=False)
        if job.recipe.policy.model_name is not None:
            check_inputs(job.folder, files_of_model(Path(job.recipe.policy.model_name)), ANOTHER_OUT)


@contextmanager
def only_one(out: Path) -> Iterator[None]:
    """Create the experiment's folder and hold its lock within the block."""
    try:
        for folder in (out / RUNS, out / LOGS):
            folder.mkdir(parents=True, exist_ok=True)
        lock = (out / ".lock").open("w")
    except OSError as error:
        raise UserError(f"--out {out} cannot be written ({error.strerror}); choose another folder") from None
    # The lock keeps a second command from writing into the folders of the same runs.
    with lock:
        refusal = f"--out {out} is in use by another process; wait for it or end it"
        hold_lock(lock, refusal, per_process=True)
        yield
