"""``nemo-grpo compare`` and ``nemo-grpo sweep``: many runs, one table, one report."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Argument, Option

from nemo_grpo.cli import launch
from nemo_grpo.cli.recipe import Overrides, wide_console
from nemo_grpo.support.errors import UserError
from nemo_grpo.support.sections import parse_seeds

if TYPE_CHECKING:
    from rich.table import Table

    from nemo_grpo.experiments.cluster import Slurm
    from nemo_grpo.experiments.jobs import Job
    from nemo_grpo.experiments.results import Results
    from nemo_grpo.experiments.sweep import Sweep

Seeds = Annotated[str | None, Option(help="How many (3 is 0,1,2), or which, comma-separated.")]
Out = Annotated[Path | None, Option(help="Folder of runs, table and report.")]
Jobs = Annotated[int, Option(min=1, help="Runs at a time.")]
Baseline = Annotated[str | None, Option(help="Setting to compare with; else grpo, or the first.")]
DryRun = Annotated[bool, Option("--dry-run", help="Check every recipe, list the runs, start nothing.")]


def compare(
    recipe: Annotated[Path, Argument(help="As recipes/quickstart.yaml.")],
    overrides: Overrides = None,
    variants: Annotated[str, Option(help="Comma-separated.")] = "grpo,cw_grpo,tr_grpo,erpo,gpg",
    seeds: Seeds = "3",
    out: Out = None,
    jobs: Jobs = 1,
    baseline: Baseline = None,
    dry_run: DryRun = False,
) -> None:
    """Train several variants over seeds from one start, and compare them, paired by seed.

    A variant's recipe is RECIPE-<variant>.yaml beside the recipe, else the recipe with that variant; what the
    recipe sets of loss_fn then holds for every variant that has the parameter. Settings that differ are
    printed, and stand in table.md. Repeat the command to continue: finished runs stay, others are resumed.
    A run that fails does not stop the others.

    Examples:
      nemo-grpo compare recipes/quickstart.yaml --variants grpo,cw_grpo,tr_grpo,erpo,gpg --seeds 3 --jobs 2
      nemo-grpo compare recipes/quickstart.yaml --seeds 20 --baseline gpg
      nemo-grpo compare recipes/quickstart.yaml --variants grpo,dapo --seeds 0,7 grpo.max_num_steps=40

    Exit codes: 0 all runs finished; 1 some failed; 2 refused, nothing was run; 75 stopped, repeat it.
    """
    from nemo_grpo.experiments.sweep import sweep_variants

    names = [name.strip() for name in variants.split(",") if name.strip()]
    made = sweep_variants(recipe, names, parse_seeds(seeds or "3"))
    out = out or Path("runs") / f"compare-{made.name}"
    _run(make_runs(made, overrides, None, out), out, jobs, baseline, dry_run)


def sweep(
    name: Annotated[str, Argument(metavar="SWEEP", help="YAML file, or a preset in recipes/sweeps.")],
    overrides: Overrides = None,
    seeds: Seeds = None,
    out: Out = None,
    jobs: Jobs = 1,
    baseline: Baseline = None,
    dry_run: DryRun = False,
    target: Annotated[
        Literal["embedded", "cluster"], Option(help="Train here, or submit every run as `launch` does.")
    ] = "embedded",
    time: launch.Time = None,
    account: launch.Account = None,
    partition: launch.Partition = None,
    gpu: launch.Gpu = "h100",
    container: launch.Container = None,
    mounts: launch.Mounts = None,
    logs: launch.LogsFolder = None,
    sbatch: launch.Sbatch = None,
) -> None:
    """Train one recipe under several settings over seeds: ablations and sensitivity sweeps.

    Presets: ablations, tr_grpo-weighting, tr_grpo-sensitivity, gpg-components, gpg-normalization,
    gpg-group_size, gpg-threshold. With --target cluster they vary the papers' recipes: each run's recipe is
    written to OUT/recipes and planned, and all are submitted as one Slurm array. Repeat the command to submit
    added runs, and for table and report of the runs that are done.

    Examples:
      nemo-grpo sweep tr_grpo-weighting --seeds 3 --jobs 2
      nemo-grpo sweep tr_grpo-weighting --target cluster --time 04:00:00 --partition batch --dry-run

    Exit codes and continuing: as compare.
    """
    from nemo_grpo.experiments.sweep import find_sweep, load_sweep

    on_cluster = target == "cluster"
    loaded = load_sweep(find_sweep(name), target)
    out = out or Path("runs") / f"sweep-{loaded.name}{'-cluster' if on_cluster else ''}"
    runs = make_runs(loaded, overrides, seeds, out, prefix=f"{loaded.name}-" if on_cluster else "")
    options = launch.sbatch_options(time, account, partition, sbatch)
    environment = launch.job_environment(container, mounts, logs)
    if on_cluster:
        from nemo_grpo.experiments.cluster import Slurm

        _submit(runs, out, Slurm(gpu, options, environment), baseline, dry_run)
    elif given := [name for name, value in {**options, **environment}.items() if value is not None]:
        raise UserError(f"--{given[0].lower()} is for jobs on Slurm; add --target cluster, or leave it out")
    else:
        _run(runs, out, jobs, baseline, dry_run)


def make_runs(
    made: Sweep, overrides: Sequence[str] | None, seeds: str | None, out: Path, prefix: str = ""
) -> list[Job]:
    """Make the runs of a sweep with the command line's overrides and seeds."""
    from nemo_grpo.experiments.jobs import make_jobs
    from nemo_grpo.experiments.sweep import with_overrides

    chosen = made.seeds if seeds is None else parse_seeds(seeds)
    return make_jobs(with_overrides(made.settings, overrides or []), chosen, out, prefix=prefix)


def _submit(runs: Sequence[Job], out: Path, slurm: Slurm, baseline: str | None, dry_run: bool) -> None:
    from nemo_grpo.experiments.cluster import prepare_array, recipe_file, submit_experiment

    show_differences(runs)
    if dry_run:
        array = prepare_array(runs, out, slurm, dry_run=True)
        if array is not None:
            typer.echo(str(array.submission))
            for task, job in enumerate(array.runs):
                typer.echo(f"{task}  {recipe_file(job, out)}")
        return
    found = submit_experiment(runs, out, slurm, _command(), baseline)
    show_results(found)
    typer.echo(", ".join(map(str, (out / "recipes", out / "submitted.json", *found.files))))


def _command() -> str:
    return shlex.join(["nemo-grpo", *sys.argv[1:]])


def _run(runs: Sequence[Job], out: Path, num_parallel: int, baseline: str | None, dry_run: bool) -> None:
    from nemo_grpo.experiments.runner import check_settings, run_experiment
    from nemo_grpo.run.recipe_checks import remedies

    show_differences(runs)
    if dry_run:
        for sentence in remedies(check_settings(runs)):
            typer.echo(sentence, err=True)
        for job in runs:
            typer.echo(f"{job.folder}  {job.setting.recipe} {shlex.join(job.setting.overrides)}".rstrip())
        return
    found, code = run_experiment(runs, out, num_parallel=num_parallel, command=_command(), baseline=baseline)
    show_results(found)
    typer.echo(", ".join(map(str, found.files)))
    raise typer.Exit(code)


def show_differences(runs: Sequence[Job]) -> None:
    """Print the settings that differ between the runs, before any of them starts."""
    from rich.table import Table

    from nemo_grpo.experiments.results import settings_that_differ

    head, rows = settings_that_differ(runs)
    table = Table(*head, box=None)
    for row in rows:
        table.add_row(*row)
    if rows:  # standard output has the runs of a dry run, one a line
        wide_console(stderr=True).print(table, "")


def show_results(found: Results) -> None:
    """Print the tables and the notes below them, as wide as the terminal."""
    from nemo_grpo.report.paired import paired_table
    from nemo_grpo.report.summary import table

    console = wide_console()
    tables = [table(found.groups)] if found.groups else []
    tables += [paired_table(found.paired, found.baseline)] if found.paired else []
    for head, rows in tables:
        for part in comparison(head, rows, console.width):
            console.print(part, "")
    console.print(found.notes(), markup=False, highlight=False)


def comparison(head: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Iterator[Table]:
    """Lay out a row per figure and a column per setting; columns that do not fit follow in another table."""
    from rich.table import Table

    widths = [max(map(len, cells)) + 2 for cells in (head, *rows)]
    while rows:
        total, shown = widths[0], 0
        while shown < len(rows) and (not shown or total + widths[shown + 1] <= width):
            shown += 1
            total += widths[shown]
        made = Table(head[0], *(row[0] for row in rows[:shown]), box=None)
        for name, *cells in zip(head[1:], *(row[1:] for row in rows[:shown]), strict=True):
            made.add_row(name, *cells)
        yield made
        rows, widths = rows[shown:], [widths[0], *widths[shown + 1 :]]
