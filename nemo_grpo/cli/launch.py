"""``nemo-grpo launch``: recipes as Slurm jobs; ``nemo-grpo slurm``: their scripts without a clone."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option
from typer.core import TyperGroup

from nemo_grpo.cli.recipe import Overrides, RecipeFile
from nemo_grpo.cli.rehearse import run_rehearsal
from nemo_grpo.support.errors import UserError

if TYPE_CHECKING:
    from datetime import timedelta

    from nemo_grpo.recipe import Recipe


class LaunchGroup(TyperGroup):
    """``launch RECIPE`` means ``launch submit RECIPE``; ``launch`` alone shows its options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in self.commands:
            args = ["submit", *(args or ["--help"])]
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="launch",
    cls=LaunchGroup,
    help="Recipes as Slurm jobs: `launch RECIPE --nodes N --time T` plans and submits, `launch status RUN`.",
)

Time = Annotated[str | None, Option(help="Time limit of one attempt, such as 04:00:00.")]
Account = Annotated[str | None, Option(help="Slurm account.")]
Partition = Annotated[str | None, Option(help="Slurm partition.")]
Gpu = Annotated[str, Option(help="GPU that the plan is for, as `nemo-grpo plan --gpu`.")]
Container = Annotated[str | None, Option(help="Image for Pyxis. Default: CONTAINER.")]
Mounts = Annotated[str | None, Option(help="FROM:TO,... Default: MOUNTS.")]
LogsFolder = Annotated[Path | None, Option(help="Folder of logs. Default: LOGS, or logs.")]
Sbatch = Annotated[list[str] | None, Option(help="Option of sbatch, as qos=high or exclusive. Repeatable.")]
Logs = Annotated[Path, Option(help="Folder of the jobs' logs.", envvar="LOGS")]


@app.command()
def submit(
    recipe: RecipeFile,
    overrides: Overrides = None,
    nodes: Annotated[int | None, Option(min=1, help="Default: the recipe's.")] = None,
    time: Time = None,
    account: Account = None,
    partition: Partition = None,
    gpu: Gpu = "h100",
    container: Container = None,
    mounts: Mounts = None,
    logs: LogsFolder = None,
    sbatch: Sbatch = None,
    rehearse: Annotated[bool, Option("--rehearse", help="Rehearse it here first.")] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Print the command; submit nothing.")] = False,
) -> None:
    """Plan a recipe, then submit it; nodes, GPUs and the job's name come from the recipe.

    `nemo-grpo launch status RUN` shows the job.

    Example: nemo-grpo launch recipes/gpg/gpg-qwen2.5-math-7b-zero-1n8g.yaml --time 04:00:00 --partition batch

    Exit codes: 0 submitted; 2 the recipe, its plan, or Slurm refuses.
    """
    from nemo_grpo.launch.container import notes as container_notes
    from nemo_grpo.launch.submit import parse_time_limit, prepare, recipe_for_job, scripts_folder
    from nemo_grpo.launch.submit import submit as run_sbatch
    from nemo_grpo.recipe import load_recipe

    recipe = recipe_for_job(recipe)
    overrides = [*(overrides or []), *([f"cluster.num_nodes={nodes}"] if nodes is not None else [])]
    loaded = load_recipe(recipe, overrides)
    limit = None if time is None else parse_time_limit(time)
    if time is not None:
        typer.echo(f"time limit of an attempt: {limit or 'none'}", err=True)
    options = sbatch_options(time, account, partition, sbatch)
    _check(loaded, dry_run=dry_run)
    _plan(loaded, gpu, limit, options.get("signal"))
    if rehearse and run_rehearsal(recipe, overrides):
        raise UserError("the rehearsal failed; nothing was submitted")
    environment = job_environment(container, mounts, logs)
    submission = prepare(loaded, recipe, overrides, options, environment)
    of_job = os.environ | {name: value for name, value in environment.items() if value is not None}
    for sentence in container_notes(loaded, recipe, scripts_folder().parent, of_job):
        typer.echo(f"container: {sentence}", err=True)
    if dry_run:
        typer.echo(str(submission))
        return
    job, run = run_sbatch(submission), loaded.nemo_grpo.run_name
    folder = str(logs or os.environ.get("LOGS") or "")
    where = f" --logs {shlex.quote(folder)}" if folder else ""
    driver = Path(folder or "logs") / run / "latest/driver.log"
    typer.echo(
        f"job {job} ({run})\n  status  nemo-grpo launch status {run}{where}\n"
        f"  follow  tail -F {shlex.quote(str(driver))}\n  cancel  scancel {job}"
    )


def _plan(recipe: Recipe, gpu: str, limit: timedelta | None, signal: str | None) -> None:
    from nemo_grpo.launch.plan_summary import plan_verdict, time_verdict
    from nemo_grpo.recipe.cluster_rules import NOTHING_SAVED

    if not recipe.checkpointing.enabled:
        typer.echo(f"plan: {NOTHING_SAVED}", err=True)
    accepted, sentence = plan_verdict(recipe, gpu)
    typer.echo(f"plan: {sentence}", err=True)
    if not accepted:
        raise UserError("the plan refuses the recipe; nothing was submitted")
    if limit is not None:
        enough, sentence = time_verdict(recipe, gpu, limit, signal)
        if not enough:
            raise UserError(f"{sentence}; nothing was submitted")
        typer.echo(f"plan: {sentence}", err=True)


def _check(recipe: Recipe, *, dry_run: bool) -> None:
    """Check the recipe and its data; a dry run does not need the data files yet."""
    from nemo_grpo.run.recipe_checks import check_recipe, remedies

    checked = check_recipe(recipe, continues=True)
    for sentence in (*remedies(checked.missing), *checked.notes, *filter(None, [checked.found])):
        typer.echo(f"data: {sentence}", err=True)
    checked.refuse(missing=False)
    if checked.missing and not dry_run:
        raise UserError("the data are not ready, as said above; nothing was submitted")


def sbatch_options(
    time: str | None, account: str | None, partition: str | None, others: list[str] | None
) -> dict[str, str | None]:
    """Name sbatch's long options."""
    from nemo_grpo.launch.submit import sbatch_option

    named = {"time": time, "account": account, "partition": partition}
    return named | dict(map(sbatch_option, others or ()))


def job_environment(container: str | None, mounts: str | None, logs: Path | None) -> dict[str, str | None]:
    """Name the variables that the job scripts read."""
    if mounts and not (container or os.environ.get("CONTAINER")):
        raise UserError(f"--mounts {mounts}: nothing is mounted without a container; add --container")
    return {"CONTAINER": container, "MOUNTS": mounts, "LOGS": str(logs.absolute()) if logs else None}


@app.command()
def status(
    run: Annotated[str, Argument(help="The run's name, or a job's number.")],
    logs: Logs = Path("logs"),
    lines: Annotated[int, Option(min=0, help="Last lines of the driver's log.")] = 5,
) -> None:
    """Show a run's newest job: Slurm's state, its attempts, newest checkpoint, last lines."""
    from nemo_grpo.launch.submit import status_of

    for line in status_of(run, logs, lines):
        typer.echo(line)


@app.command(hidden=True)
def settings(recipe: RecipeFile, overrides: Overrides = None) -> None:
    """Print where the run's folders are, for the shell of a job."""
    from nemo_grpo.launch.preflight import shell_settings
    from nemo_grpo.recipe import load_recipe

    typer.echo(shell_settings(load_recipe(recipe, overrides or [])), nl=False)


slurm = typer.Typer(name="slurm", no_args_is_help=True, help="Job scripts where there is no clone.")
slurm.callback()(lambda: None)  # a group, so that its only command has a name


@slurm.command()
def scripts(
    folder: Annotated[Path, Argument(metavar="DIR", help="New folder that all nodes share.")],
) -> None:
    """Write the job scripts, and the package's sources, which the workers of a job import from there.

    Set NEMO_GRPO_ROOT to the folder for `nemo-grpo launch`, or use slurm/train.sbatch in it by hand.
    """
    import checkpoints_conv
    import nemo_grpo
    from nemo_grpo.support import shipped

    sources = {
        "slurm": shipped.folder("slurm"),
        "recipes": shipped.folder("recipes"),
        "nemo_grpo": Path(nemo_grpo.__file__).parent,
        "checkpoints_conv": Path(checkpoints_conv.__file__).parent,
    }
    ignored = shutil.ignore_patterns("__pycache__")
    try:
        folder.mkdir(parents=True)
        for name, source in sources.items():
            shutil.copytree(source, folder / name, ignore=ignored)
    except FileExistsError:
        raise UserError(f"{folder} exists; name a new folder") from None
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error}); name another folder") from None
    typer.echo(
        f"{folder / 'slurm'}: job scripts; export NEMO_GRPO_ROOT={shlex.quote(str(folder.absolute()))} for "
        "nemo-grpo launch"
    )
