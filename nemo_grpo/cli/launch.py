"""``nemo-grpo launch`` submits recipes as Slurm jobs; ``nemo-grpo slurm`` serves the scripts of the jobs."""

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
    """Makes ``launch RECIPE`` short for ``launch submit RECIPE``. ``launch`` alone shows its options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in self.commands:
            args = ["submit", *(args or ["--help"])]
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="launch",
    cls=LaunchGroup,
    help="Submit recipes as Slurm jobs: `launch RECIPE` submits one, `launch status RUN` shows its job.",
)

Time = Annotated[str | None, Option(help="Time limit of one attempt, such as 04:00:00.")]
Account = Annotated[str | None, Option(help="Slurm account that is charged.")]
Partition = Annotated[str | None, Option(help="Slurm partition that runs the job.")]
Gpu = Annotated[str, Option(help="GPU that the plan is for; `nemo-grpo plan --help` lists them.")]
Container = Annotated[
    str | None, Option(help="Image that Pyxis runs the job in. The default is the variable CONTAINER.")
]
Mounts = Annotated[
    str | None,
    Option(help="Further folders of the container, FROM:TO,... The default is the variable MOUNTS."),
]
LogsFolder = Annotated[
    Path | None, Option(help="Folder of logs. The default is the variable LOGS, else logs.")
]
Sbatch = Annotated[
    list[str] | None,
    Option(help="Further option of sbatch, such as qos=high or exclusive. May be repeated."),
]
Logs = Annotated[Path, Option(help="Folder of the jobs' logs.", envvar="LOGS")]


@app.command()
def submit(
    recipe: RecipeFile,
    overrides: Overrides = None,
    nodes: Annotated[
        int | None, Option(min=1, help="Number of nodes. The default is the recipe's cluster.num_nodes.")
    ] = None,
    time: Time = None,
    account: Account = None,
    partition: Partition = None,
    gpu: Gpu = "h100",
    container: Container = None,
    mounts: Mounts = None,
    logs: LogsFolder = None,
    sbatch: Sbatch = None,
    rehearse: Annotated[
        bool, Option("--rehearse", help="Rehearse the recipe here first; submit it only if that passes.")
    ] = False,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Print sbatch's whole command. Nothing is submitted.")
    ] = False,
) -> None:
    """Plan a recipe, then submit it to Slurm.

    Nodes, GPUs and the job's name come from the recipe. `nemo-grpo launch status RUN` shows the job.

    Example: nemo-grpo launch recipes/gpg/gpg-qwen2.5-math-7b-zero-1n8g.yaml --time 04:00:00 --partition batch

    Exit codes: 0 submitted; 2 the recipe, its plan, or Slurm refuses.
    """
    from nemo_grpo.launch.container import notes as container_notes
    from nemo_grpo.launch.submit import parse_time_limit, prepare, recipe_for_job, scripts_folder
    from nemo_grpo.launch.submit import submit as run_sbatch
    from nemo_grpo.recipe import load_recipe

    recipe = recipe_for_job(recipe)
    overrides = list(overrides or [])
    if nodes is not None:
        overrides.append(f"cluster.num_nodes={nodes}")
    loaded = load_recipe(recipe, overrides)
    limit = None
    if time is not None:
        limit = parse_time_limit(time)
        # Printed in full, because Slurm reads 04:00 as four minutes, and most users mean four hours.
        typer.echo(f"time limit of an attempt: {limit or 'none'}", err=True)
    options = sbatch_options(time, account, partition, sbatch)
    _check(loaded, dry_run=dry_run)
    _plan(loaded, gpu, limit, options.get("signal"))
    if rehearse and run_rehearsal(recipe, overrides):
        raise UserError("the rehearsal failed; nothing was submitted")
    environment = job_environment(container, mounts, logs)
    submission = prepare(loaded, recipe, overrides, options, environment)
    job_variables = os.environ | {name: value for name, value in environment.items() if value is not None}
    for sentence in container_notes(loaded, recipe, scripts_folder().parent, job_variables):
        typer.echo(f"container: {sentence}", err=True)
    if dry_run:
        typer.echo(str(submission))
        return
    job = run_sbatch(submission)
    _show_job(job, loaded.nemo_grpo.run_name, str(logs or os.environ.get("LOGS") or ""))


def _show_job(job: str, run: str, logs: str) -> None:
    """Print commands that show the state and the log of a submitted job."""
    logs_option = f" --logs {shlex.quote(logs)}" if logs else ""
    driver_log = Path(logs or "logs") / run / "latest/driver.log"
    typer.echo(f"job {job} ({run})")
    typer.echo(f"  status  nemo-grpo launch status {run}{logs_option}")
    typer.echo(f"  follow  tail -F {shlex.quote(str(driver_log))}")
    typer.echo(f"  cancel  scancel {job}")


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
    """Check the recipe and its data. In a dry run data files may still be missing."""
    from nemo_grpo.run.recipe_checks import check_recipe, remedies

    checked = check_recipe(recipe, continues=True)
    sentences = [*remedies(checked.missing), *checked.notes]
    if checked.found:
        sentences.append(checked.found)
    for sentence in sentences:
        typer.echo(f"data: {sentence}", err=True)
    checked.refuse(missing=False)
    if checked.missing and not dry_run:
        raise UserError("the data are not ready, as said above; nothing was submitted")


def sbatch_options(
    time: str | None, account: str | None, partition: str | None, further: list[str] | None
) -> dict[str, str | None]:
    """Collect sbatch's long options, where None leaves an option out.

    Args:
        time: value of --time.
        account: value of --account.
        partition: value of --partition.
        further: values of --sbatch.
    """
    from nemo_grpo.launch.submit import sbatch_option

    options = {"time": time, "account": account, "partition": partition}
    for option in further or []:
        name, value = sbatch_option(option)
        options[name] = value
    return options


def job_environment(container: str | None, mounts: str | None, logs: Path | None) -> dict[str, str | None]:
    """Return the variables of the job scripts that the command line sets."""
    if mounts and not (container or os.environ.get("CONTAINER")):
        raise UserError(f"--mounts {mounts}: nothing is mounted without a container; add --container")
    return {"CONTAINER": container, "MOUNTS": mounts, "LOGS": str(logs.absolute()) if logs else None}


@app.command()
def status(
    run: Annotated[str, Argument(help="Name of the run, or number of a job.")],
    logs: Logs = Path("logs"),
    lines: Annotated[int, Option(min=0, help="Number of last lines of the driver's log to show.")] = 5,
) -> None:
    """Show a run's newest job: state in Slurm, attempts, newest checkpoint, end of the log."""
    from nemo_grpo.launch.submit import status_of

    for line in status_of(run, logs, lines):
        typer.echo(line)


@app.command(hidden=True)
def settings(recipe: RecipeFile, overrides: Overrides = None) -> None:
    """Print the run's folders as shell assignments. The job scripts call this command."""
    from nemo_grpo.launch.preflight import shell_settings
    from nemo_grpo.recipe import load_recipe

    typer.echo(shell_settings(load_recipe(recipe, overrides or [])), nl=False)


slurm = typer.Typer(
    name="slurm",
    no_args_is_help=True,
    help="Write the job scripts where the repository is not cloned.",
)
# With this callback the command keeps its name. Typer would turn a group with a single command into that
# command.
slurm.callback()(lambda: None)


@slurm.command()
def scripts(
    folder: Annotated[Path, Argument(metavar="DIR", help="New folder, which all nodes share.")],
) -> None:
    """Write the job scripts, and the package's sources, which the workers of a job import from there.

    Then set NEMO_GRPO_ROOT to the folder, and `nemo-grpo launch` uses it. To submit a job by hand, use
    slurm/train.sbatch in the folder.
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
