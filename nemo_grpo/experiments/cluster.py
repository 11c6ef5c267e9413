"""Experiments on Slurm: every run's recipe is written to a file, and one array job runs them all."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from nemo_grpo.experiments.jobs import Job, Status, naming, one_per_setting
from nemo_grpo.experiments.results import Results, is_complete, steps_done, write_results
from nemo_grpo.experiments.runner import only_one
from nemo_grpo.launch.plan_summary import plan_verdict, time_verdict
from nemo_grpo.launch.submit import Submission, parse_time_limit, prepare, submit
from nemo_grpo.recipe import Recipe
from nemo_grpo.run.continuation import check_continuation
from nemo_grpo.run.recipe_checks import check_recipe
from nemo_grpo.support.errors import UserError, reading
from nemo_grpo.support.files import write_atomically

log = logging.getLogger(__name__)

RECIPES = "recipes"
SUBMITTED = "submitted.json"


@dataclass(frozen=True)
class Slurm:
    """Options of `nemo_grpo.launch.submit.prepare`, and the GPU to plan for.

    Attributes:
        gpu: name of a GPU that the planner knows.
        options: long options of sbatch; None leaves an option out.
        environment: variables of the job scripts; None keeps this process's value.
    """

    gpu: str
    options: Mapping[str, str | None]
    environment: Mapping[str, str | None]


@dataclass(frozen=True)
class ArrayJob:
    """Runs that are submitted as one Slurm array.

    Attributes:
        runs: runs in the order of the array's tasks.
        recipes: file that lists the runs' recipe files, one on each line.
        submission: the sbatch command.
    """

    runs: Sequence[Job]
    recipes: Path
    submission: Submission


def prepare_array(jobs: Sequence[Job], out: Path, slurm: Slurm, *, dry_run: bool = False) -> ArrayJob | None:
    """Check all jobs as `nemo-grpo launch` does, and build the command that submits the new ones.

    Nothing is written.

    Args:
        jobs: runs of all settings and seeds.
        out: folder of the experiment.
        slurm: options of the submission.
        dry_run: accept missing data files.

    Returns:
        The array of the runs that are not submitted yet; None if all are.
    """
    submitted = _read(out / SUBMITTED)
    new = [job for job in jobs if job.name not in submitted]
    limit = slurm.options.get("time")
    time = None if limit is None else parse_time_limit(limit)
    for job in one_per_setting(jobs):
        for sentence in _refusals(job.recipe, slurm, time):
            raise UserError(f"{job.setting.label}: {sentence}")
    for job in one_per_setting(new):
        with naming(job.setting):
            check_recipe(job.recipe, continues=False).refuse(missing=not dry_run)
    for job in new:
        with naming(job.setting):
            check_continuation(job.recipe)
    if not new:
        return None
    first = new[0]
    expected_nodes = _nodes_of(first)
    for job in new:
        nodes = _nodes_of(job)
        if nodes != expected_nodes:
            raise UserError(
                f"{job.setting.label} needs {nodes}, and {first.setting.label} {expected_nodes}: the runs "
                "are tasks of one Slurm array; make cluster.num_nodes and cluster.gpus_per_node equal"
            )
    # The list is named after its first run. A list of an earlier command must stay, because an array that
    # still waits in the queue will read it.
    recipes = (out / RECIPES / f"from-{first.name}.txt").absolute()
    options = {**slurm.options, "array": f"0-{len(new) - 1}", "job-name": out.name}
    submission = prepare(first.recipe, recipes, [], options, slurm.environment)
    return ArrayJob(new, recipes, submission)


def _nodes_of(job: Job) -> str:
    cluster = job.recipe.cluster
    return f"{cluster.num_nodes} x {cluster.gpus_per_node} GPUs"


def _refusals(recipe: Recipe, slurm: Slurm, time: timedelta | None) -> Iterator[str]:
    if recipe.nemo_grpo.target != "cluster":
        yield (
            f"its recipe has nemo_grpo.target={recipe.nemo_grpo.target}; --target cluster needs a cluster "
            "recipe: set sweep.cluster.recipe in the sweep's file"
        )
    verdicts = [plan_verdict(recipe, slurm.gpu)]
    if time is not None:
        verdicts.append(time_verdict(recipe, slurm.gpu, time, slurm.options.get("signal")))
    yield from (sentence for accepted, sentence in verdicts if not accepted)


def recipe_file(job: Job, out: Path) -> Path:
    """Return the path of a run's resolved recipe."""
    return (out / RECIPES / f"{job.name}.yaml").absolute()


def submit_experiment(
    jobs: Sequence[Job], out: Path, slurm: Slurm, command: str, baseline: str | None = None
) -> Results:
    """Write the recipes, submit the runs that are not submitted yet, and write the results of complete runs.

    The new runs become tasks of one Slurm array. ``out/submitted.json`` lists the task of each run. It is
    written right after the submission, so that a repeated command submits only new runs.

    Args:
        jobs: runs of all settings and seeds.
        out: folder of the experiment.
        slurm: options of the submission.
        command: this command line, for the record.
        baseline: see `results.baseline_of`.
    """
    array = prepare_array(jobs, out, slurm)
    with only_one(out):
        numbers = _read(out / SUBMITTED)
        _check_submitted_recipes(jobs, out, numbers)
        if array is not None:
            numbers |= _submit_array(array, out)
            write_atomically(out / SUBMITTED, json.dumps(numbers, indent=2) + "\n")
        finished = {}
        unfinished = {}
        for job in jobs:
            if is_complete(job):
                finished[job.name] = Status("finished", 0)
            else:
                progress = f"step {steps_done(job)} of {job.recipe.grpo.max_num_steps}"
                unfinished[job.name] = f"job {numbers[job.name]}, {progress}"
        return write_results(jobs, finished, out, command, unfinished, baseline)


def _check_submitted_recipes(jobs: Sequence[Job], out: Path, numbers: Mapping[str, str]) -> None:
    """Refuse jobs whose recipes differ from the recipes with which they were submitted."""
    for job in jobs:
        path = recipe_file(job, out)
        if job.name not in numbers or not path.is_file():
            continue
        if path.read_text() != job.recipe.to_yaml():
            raise UserError(
                f"{job.name} was submitted as job {numbers[job.name]} with the recipe {path}, which is "
                "another one now; choose another --out"
            )


def _submit_array(array: ArrayJob, out: Path) -> dict[str, str]:
    """Write the recipes and submit the array; returns the Slurm task of each run."""
    (out / RECIPES).mkdir(exist_ok=True)
    for job in array.runs:
        write_atomically(recipe_file(job, out), job.recipe.to_yaml())
    lines = [f"{recipe_file(job, out)}\n" for job in array.runs]
    write_atomically(array.recipes, "".join(lines))
    number = submit(array.submission)
    log.info("job %s: %d runs", number, len(array.runs))
    return {job.name: f"{number}_{task}" for task, job in enumerate(array.runs)}


def _read(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    remedy = "correct it, or choose another --out: it is not known what was submitted"
    # AttributeError, because JSON that is not an object has no items.
    with reading(path, "a JSON object of job numbers", remedy, AttributeError):
        return {str(name): str(number) for name, number in json.loads(path.read_text()).items()}
