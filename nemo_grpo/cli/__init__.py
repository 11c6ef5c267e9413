"""``nemo-grpo``: every command. Heavy imports happen inside the commands, so ``--help`` is quick."""

import inspect
import logging
import os
import re
import sys
from pathlib import Path
from typing import Annotated, TextIO

import typer
from typer import Argument, Option

from nemo_grpo import __version__
from nemo_grpo.cli import (
    compare,
    convert,
    data,
    eval,
    launch,
    plan,
    preflight,
    recipe,
    rehearse,
    retriever,
    variants,
)
from nemo_grpo.support.errors import EXIT_USAGE, UserError

log = logging.getLogger(__name__)
app = typer.Typer(
    name="nemo-grpo", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)


def print_version(is_requested: bool) -> None:
    """Print the version and exit, if it is requested."""
    if is_requested:
        typer.echo(f"nemo-grpo {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, Option("--version", callback=print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train reasoning policies with GRPO and its variants, from one recipe."""


@app.command()
def train(
    file: Annotated[Path, Argument(metavar="RECIPE", help="Recipe, such as recipes/quickstart.yaml.")],
    overrides: recipe.Overrides = None,
    resume: Annotated[
        bool,
        Option("--resume", help="Continue the run from its newest checkpoint, if there is one."),
    ] = False,
) -> None:
    """Train a policy on this machine.

    The run writes into runs/<nemo_grpo.run_name>/: metrics, samples, plots, checkpoints, and at the end the
    model as a Hugging Face folder.

    Examples:
      nemo-grpo train recipes/quickstart.yaml
      nemo-grpo train recipes/quickstart.yaml loss_fn.variant=gpg nemo_grpo.run_name=gpg grpo.max_num_steps=20

    Exit codes: 0 finished; 2 the input was refused and nothing was created; 75 SIGINT, SIGTERM or SIGUSR1
    stopped the run, which saved a checkpoint (repeat the command with --resume); 1 anything else.
    """
    from nemo_grpo.recipe import advice, load_recipe

    # Load the recipe before the imports below, which take seconds, so that a typo shows at once.
    loaded = load_recipe(file, overrides or [])
    for sentence in advice(loaded):
        log.warning("%s", sentence)

    from nemo_grpo.engine.run import run_recipe

    sys.exit(run_recipe(loaded, sys.argv[1:], resume=resume))


@app.command()
def report(
    runs: Annotated[list[Path], Argument(metavar="RUN...", help="Folders of runs, comparisons or sweeps.")],
    output: Annotated[
        Path, Option("--output", "-o", help="HTML file to write. The plots go into plots/ beside it.")
    ] = Path("report.html"),
) -> None:
    """Compare runs in one HTML file: learning curves, diagnostics, and a table over seeds.

    Runs that differ only in their seed become one line with a band.

    Example: nemo-grpo report runs/grpo-s0 runs/grpo-s1 runs/gpg-s0 -o compare/report.html
    """
    from nemo_grpo.report.report import write_report

    written = write_report(runs, output)
    typer.echo(f"wrote {written} and {written.parent / 'plots'}/*.png")


@app.command()
def doctor(
    nemo_rl: Annotated[
        Path | None, Option(help="Folder of NeMo-RL's clone. The default is the variable NEMO_RL_SRC.")
    ] = None,
) -> None:
    """Check that a NeMo-RL tree has the names that this package calls and replaces, with their signatures.

    The command reads the tree's source. It imports nothing, needs no GPU, and takes a few seconds. It lists
    each name that does not fit, with the recipes that need it and the signatures expected and found.

    Example: nemo-grpo doctor --nemo-rl ../RL

    Exit codes: 0 all names fit, or only those of the single controller do not; 1 others do not fit; 2 the
    folder holds no NeMo-RL.
    """
    from nemo_grpo.nemorl.doctor import check_tree
    from nemo_grpo.nemorl.host_api import HOST_API, SINGLE_CONTROLLER, tested

    source = str(nemo_rl or os.environ.get("NEMO_RL_SRC") or "")
    if not source:
        raise UserError("--nemo-rl is missing and NEMO_RL_SRC is not set; give the folder of NeMo-RL's clone")
    misfits = check_tree(Path(source))
    for misfit in misfits:
        typer.echo(f"{misfit} [{misfit.name.part}]")
    # NeMo-RL 0.7.0 has no single controller.
    fits = all(misfit.name.part == SINGLE_CONTROLLER for misfit in misfits)
    if not fits:
        verdict = f"NeMo-RL does not fit; tested: {tested()}"
    elif misfits:
        verdict = f"NeMo-RL fits, except for {SINGLE_CONTROLLER}"
    else:
        verdict = "NeMo-RL fits"
    color = "green" if fits else "red"
    typer.secho(f"doctor: {verdict}; {len(misfits)} of {len(HOST_API)} names differ", fg=color)
    raise typer.Exit(0 if fits else 1)


for command in (plan.plan, rehearse.rehearse, compare.compare, compare.sweep, preflight.preflight):
    app.command()(command)
app.command("eval")(eval.eval_command)
GROUPS = (recipe.app, convert.app, data.app, launch.app, launch.slurm, retriever.app, variants.app)
for group in (app, *GROUPS):
    for registered in group.registered_commands:
        docstring = inspect.getdoc(registered.callback) or ""
        # Join the lines of each paragraph, because the terminal wraps them anew. Indented lines stay:
        # they are examples.
        registered.help = re.sub(r"(?<!\n)\n(?!\n| )", " ", docstring)
for group in GROUPS:
    app.add_typer(group)


class StderrHandler(logging.StreamHandler[TextIO]):
    """Log handler that looks up `sys.stderr` for every message.

    While rich shows a progress bar, it replaces `sys.stderr` in order to print messages above the bar.
    """

    def __init__(self) -> None:
        # StreamHandler's own __init__ would store the stream of this moment.
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        """The standard error of this moment."""
        return sys.stderr


def main(commands: typer.Typer = app) -> None:
    """Run the command line. A `UserError` becomes one line on stderr and exit code 2."""
    is_first_rank = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(
        level=logging.INFO if is_first_rank else logging.WARNING,
        format="%(levelname)s %(name)s: %(message)s",
        handlers=[StderrHandler()],
    )
    for chatty in ("megatron", "huggingface_hub", "matplotlib", "vllm"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    try:
        commands()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USAGE)
