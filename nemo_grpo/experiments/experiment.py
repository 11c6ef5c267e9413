"""An experiment from its plan to its report."""

import logging
from collections.abc import Sequence
from pathlib import Path

from nemo_grpo.engine.checks import check_machine
from nemo_grpo.engine.recipe_checks import check_recipe, remedies
from nemo_grpo.engine.signals import EXIT_INTERRUPTED
from nemo_grpo.engine.warm_start import starting_policy
from nemo_grpo.experiments.jobs import Job, naming
from nemo_grpo.experiments.results import Results, baseline_of, write_results
from nemo_grpo.experiments.runner import check_unchanged, run_jobs
from nemo_grpo.support.errors import UserError

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
    if missing := check_settings(jobs):
        raise UserError("; ".join(remedies(missing)))
    check_unchanged(jobs)
    make_starts(jobs)
    ended = run_jobs(jobs, out, num_parallel)
    found = write_results(jobs, ended, out, command, baseline=baseline)
    states = {ended[job.name].state if job.name in ended else "interrupted" for job in jobs}
    if "failed" in states:
        return found, 1
    return found, EXIT_INTERRUPTED if "interrupted" in states else 0


def check_settings(jobs: Sequence[Job]) -> list[str]:
    """Refuse settings that could not be trained; seeds are alike.

    Returns: what other commands write first, see `recipe_checks.remedies`.
    Raises:  UserError: naming the setting.
    """
    missing = list[str]()
    for job in {job.setting.label: job for job in jobs}.values():
        with naming(job):
            check_machine(job.recipe)
            found = check_recipe(job.recipe, continues=False)
            found.refuse(missing=False)
        missing += found.missing
    return missing


def make_starts(jobs: Sequence[Job]) -> None:
    """Warm-start each policy missing from the cache once, before several runs would."""
    done = []
    for job in jobs:
        own = job.recipe.nemo_grpo
        if own.warm_start is None or (own.warm_start, own.task, own.prompt) in done:
            continue
        done.append((own.warm_start, own.task, own.prompt))
        log.info("start: %s", starting_policy(job.recipe))
