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

Seeds = Annotated[str | None, Option(help="Seeds: a number (3 = 0,1,2) or a list such as 0,7.")]
Out = Annotated[
    Path | None,
    Option(help="Folder that gets the runs, the table and the report. The default is named after the input."),
]
Jobs = Annotated[int, Option(min=1, help="Number of runs that train at the same time.")]
Baseline = Annotated[
    str | None,
    Option(help="Setting that the others are compared with. The default is grpo, else the first setting."),
]
DryRun = Annotated[bool, Option("--dry-run", help="Check every recipe and list the runs. Nothing starts.")]


def compare(
    recipe: Annotated[Path, Argument(help="Recipe, such as recipes/quickstart.yaml.")],
    overrides: Overrides = None,
    variants: Annotated[
        str, Option(help="Variants, separated by commas. `nemo-grpo variants` lists them.")
    ] = "grpo,cw_grpo,tr_grpo,erpo,gpg",
    seeds: Seeds = "3",
    out: Out = None,
    jobs: Jobs = 1,
    baseline: Baseline = None,
    dry_run: DryRun = False,
) -> None:
    """Train several variants over seeds from one start, and compare them, paired by seed.

    A variant is trained by RECIPE-<variant>.yaml beside the recipe if there is such a file. Else it is
    trained by the recipe with that variant, and keeps the recipe's loss_fn parameters, as far as it has them.
    The command prints the settings that differ; table.md repeats them.

    Repeat the command to continue. Finished runs stay, and others are resumed. A run that fails does not stop
    the others.

    Examples:
      nemo-grpo compare recipes/quickstart.yaml --variants grpo,cw_grpo,tr_grpo,erpo,gpg --seeds 3 --jobs 2
      nemo-grpo compare recipes/quickstart.yaml --seeds 20 --baseline gpg
      nemo-grpo compare recipes/quickstart.yaml --variants grpo,dapo --seeds 0,7 grpo.max_num_steps=40

    Exit codes: 0 all runs finished; 1 some failed; 2 refused, nothing was run; 75 stopped, repeat it.
    """
    from nemo_grpo.experiments.sweep import sweep_variants

    names = [name.strip() for name in variants.split(",") if name.strip()]
    loaded = sweep_variants(recipe, names, parse_seeds(seeds or "3"))
    out = out or Path("runs") / f"compare-{loaded.name}"
    _run(make_runs(loaded, overrides, None, out), out, jobs, baseline, dry_run)


def sweep(
    name: Annotated[
        str, Argument(metavar="SWEEP", help="YAML file with the settings, or the name of a preset.")
    ],
    overrides: Overrides = None,
    seeds: Seeds = None,
    out: Out = None,
    jobs: Jobs = 1,
    baseline: Baseline = None,
    dry_run: DryRun = False,
    target: Annotated[
        Literal["embedded", "cluster"],
        Option(help="embedded trains here. cluster submits every run to Slurm, as `nemo-grpo launch` does."),
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
    gpg-group_size, gpg-threshold.

    With --target cluster the presets vary the papers' recipes. The command plans each run, writes its recipe
    to OUT/recipes, and submits all runs as one Slurm array. Repeat it to submit added runs, and to get the
    table and the report of the runs that have finished.

    Examples:
      nemo-grpo sweep tr_grpo-weighting --seeds 3 --jobs 2
      nemo-grpo sweep tr_grpo-weighting --target cluster --time 04:00:00 --partition batch --dry-run

    Exit codes and continuing are those of compare.
    """
    from nemo_grpo.experiments.sweep import find_sweep, load_sweep

    loaded = load_sweep(find_sweep(name), target)
    options = launch.sbatch_options(time, account, partition, sbatch)
    environment = launch.job_environment(container, mounts, logs)
    if target == "cluster":
        from nemo_grpo.experiments.cluster import Slurm

        out = out or Path("runs") / f"sweep-{loaded.name}-cluster"
        # The runs' names are the names of their Slurm jobs. They begin with the sweep's name,
        # which tells them from the jobs of other sweeps.
        runs = make_runs(loaded, overrides, seeds, out, prefix=f"{loaded.name}-")
        _submit(runs, out, Slurm(gpu, options, environment), baseline, dry_run)
        return
    out = out or Path("runs") / f"sweep-{loaded.name}"
    runs = make_runs(loaded, overrides, seeds, out)
    for option, value in {**options, **environment}.items():
        if value is not None:
            raise UserError(f"--{option.lower()} is for jobs on Slurm; add --target cluster, or leave it out")
    _run(runs, out, jobs, baseline, dry_run)


def make_runs(
    loaded: Sweep, overrides: Sequence[str] | None, seeds: str | None, out: Path, prefix: str = ""
) -> list[Job]:
    """Make the runs of a sweep with the command line's overrides and seeds."""
    from nemo_grpo.experiments.jobs import make_jobs
    from nemo_grpo.experiments.sweep import with_overrides

    seed_numbers = loaded.seeds if seeds is None else parse_seeds(seeds)
    return make_jobs(with_overrides(loaded.settings, overrides or []), seed_numbers, out, prefix=prefix)


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
    results = submit_experiment(runs, out, slurm, _command(), baseline)
    show_results(results)
    files = [out / "recipes", out / "submitted.json", *results.files]
    typer.echo(", ".join(map(str, files)))


def _command() -> str:
    """Write this command line, which table.md and results.json record."""
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
    results, code = run_experiment(
        runs, out, num_parallel=num_parallel, command=_command(), baseline=baseline
    )
    show_results(results)
    typer.echo(", ".join(map(str, results.files)))
    raise typer.Exit(code)


def show_differences(runs: Sequence[Job]) -> None:
    """Print the settings that differ between the runs, before any of them starts."""
    from rich.table import Table

    from nemo_grpo.experiments.results import settings_that_differ

    head, rows = settings_that_differ(runs)
    table = Table(*head, box=None)
    for row in rows:
        table.add_row(*row)
    if rows:
        # On stderr, because the stdout of a dry run lists the runs, one on each line, for a shell.
        wide_console(stderr=True).print(table, "")


def show_results(results: Results) -> None:
    """Print the tables and the notes below them, as wide as the terminal."""
    from nemo_grpo.report.paired import paired_table
    from nemo_grpo.report.summary import table

    console = wide_console()
    tables = []
    if results.groups:
        tables.append(table(results.groups))
    if results.paired:
        tables.append(paired_table(results.paired, results.baseline))
    for head, rows in tables:
        for part in comparison(head, rows, console.width):
            console.print(part, "")
    # Markup is off, because rich would read the brackets of an interval as a style.
    console.print(results.notes(), markup=False, highlight=False)


def comparison(head: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Iterator[Table]:
    """Yield tables with a row per figure and a column per setting.

    Columns that do not fit into the width go to the next table.
    """
    from rich.table import Table

    padding = 2
    head_width = max(map(len, head)) + padding
    settings = list(rows)
    while settings:
        total = head_width
        fitting: list[Sequence[str]] = []
        for setting in settings:
            total += max(map(len, setting)) + padding
            # ``fitting`` is checked first: a table has at least one column, even on a narrow terminal.
            if fitting and total > width:
                break
            fitting.append(setting)
        settings = settings[len(fitting) :]
        # The results have a row per setting; these tables have a column per setting.
        part = Table(head[0], *[setting[0] for setting in fitting], box=None)
        for column, figure in enumerate(head[1:], 1):
            part.add_row(figure, *[setting[column] for setting in fitting])
        yield part
