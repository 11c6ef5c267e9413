"""``nemo-grpo``: every command. Heavy imports happen inside the commands, so ``--help`` is quick."""

import logging
import os
import sys
from typing import Annotated

import typer

from nemo_grpo import __version__
from nemo_grpo.cli import (
    compare,
    convert,
    data,
    doctor,
    eval,
    launch,
    plan,
    preflight,
    recipe,
    rehearse,
    report,
    retriever,
    slurm,
    train,
    variants,
)
from nemo_grpo.support.errors import EXIT_USAGE, UserError

app = typer.Typer(
    name="nemo-grpo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def print_version(asked: bool) -> None:
    """Print the version and exit, if asked."""
    if asked:
        typer.echo(f"nemo-grpo {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train reasoning policies with GRPO and its variants, from one recipe."""


app.add_typer(recipe.app, name="recipe")
app.add_typer(convert.app, name="convert")
app.add_typer(data.app, name="data")
app.add_typer(launch.app, name="launch")
app.add_typer(retriever.app, name="retriever")
app.add_typer(slurm.app, name="slurm")
app.command("train")(train.train)
app.command("eval")(eval.eval_command)
app.command("preflight")(preflight.preflight)
app.command("doctor")(doctor.doctor)
app.command("plan")(plan.plan)
app.command("rehearse")(rehearse.rehearse)
app.command("report")(report.report)
app.command("compare")(compare.compare)
app.command("sweep")(compare.sweep)
app.add_typer(variants.app, name="variants")


def main(commands: typer.Typer = app) -> None:
    """Run the command line; a `UserError` becomes one line on stderr and exit code 2."""
    leads = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(
        level=logging.INFO if leads else logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
    for chatty in ("megatron", "huggingface_hub", "matplotlib", "vllm"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    try:
        commands()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USAGE)
