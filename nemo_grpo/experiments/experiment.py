"""An experiment from its plan to its report."""

import logging
from collections.abc import Sequence
from pathlib import Path

from nemo_grpo.engine import checks
from nemo_grpo.engine.warm_start import starting_policy
from nemo_grpo.errors import UserError
from nemo_grpo.experiments.jobs import Job
from nemo_grpo.experiments.results import Results, baseline_of, write_results
from nemo_grpo.experiments.runner import check_unchanged, run_jobs
from nemo_grpo.training.signals import EXIT_INTERRUPTED

log = logging.getLogger(__name__)


def run_experiment(
    jobs: Sequence[Job], out: Path, *, num_parallel: int, command: str, baseline: str | None = None
) -> tuple[Results, int]:
    """Make the shared starting policies, run the jobs, write the results.

    Args:    out: folder of everything.  command: this command line, for the record.
             baseline: see `results.baseline_of`.
    Returns: what was found; exit code 0 if every run is finished, 75 if a signal stopped some, else 1.
    Raises:  UserError: the engine refuses a recipe, a run in the folder was trained or validated differently,
             no setting is the baseline, or the folder cannot be used; nothing was run then.
    """
    baseline = baseline_of(jobs, baseline)
    for job in jobs:
        try:
            checks.check_supported(job.recipe)
            checks.check_model_source(job.recipe)
        except UserError as error:
            raise UserError(f"{job.setting.label}: {error}") from None
    check_unchanged(jobs)
    make_starts(jobs)
    ended = run_jobs(jobs, out, num_parallel)
    found = write_results(jobs, ended, out, command, baseline=baseline)
    states = {ended[job.name].state if job.name in ended else "interrupted" for job in jobs}
    if "failed" in states:
        return found, 1
    return found, EXIT_INTERRUPTED if "interrupted" in states else 0


def make_starts(jobs: Sequence[Job]) -> None:
    """Warm-start each policy missing from the cache once, before several runs would."""
    done = []
    for job in jobs:
        own = job.recipe.nemo_grpo
        if own.warm_start is None or (own.warm_start, own.task, own.prompt) in done:
            continue
        done.append((own.warm_start, own.task, own.prompt))
        log.info("start: %s", starting_policy(job.recipe))
