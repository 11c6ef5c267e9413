"""``nemo-grpo preflight``: a table of checks before a job starts."""

from __future__ import annotations

import shlex
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from nemo_grpo.cli.recipe import Overrides, RecipeFile

if TYPE_CHECKING:
    from nemo_grpo.launch.preflight import Job, Row

EXIT_REFUSED = 69
"""Exit code when a check refuses; also in slurm/lib/job.sh."""
COLOURS = {"ok": "green", "note": "yellow", "refused": "red"}


def preflight(
    recipe: RecipeFile,
    overrides: Overrides = None,
    facts: Annotated[
        Path | None,
        Option(help="A job gives the folder of its nodes' NODE.json. The default checks this machine."),
    ] = None,
    ranks: Annotated[
        Path | None,
        Option(help="A job gives the folder of its ranks' RANK.json, to check imports and all-reduce only."),
    ] = None,
    nodes: Annotated[str, Option(help="Names of the job's nodes, separated by commas.")] = "",
    settings: Annotated[
        Path | None, Option(help="The command writes the run's folders there, for the shell of the job.")
    ] = None,
) -> None:
    """Check plan, data, nodes, GPUs, folders, space and versions before a job uses its GPUs.

    Jobs run it before anything else. Without options it checks this machine alone.

    Example: nemo-grpo preflight recipes/quickstart.yaml

    Exit codes: 0 may start; 2 the recipe is wrong; 69 a check refused.
    """
    from nemo_grpo.launch.preflight import check_job, shell_settings
    from nemo_grpo.launch.ranks import check_ranks, modules_of_ranks, read_reports
    from nemo_grpo.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or [])
    node_names = nodes.split(",") if nodes else [socket.gethostname()]
    if ranks is not None:
        _show(check_ranks(loaded, node_names, read_reports(ranks)))
        return
    _show(check_job(loaded, _job(facts, node_names)))
    if settings is not None:
        modules = " ".join(modules_of_ranks(loaded))
        settings.write_text(f"{shell_settings(loaded)}RANK_MODULES={shlex.quote(modules)}\n")


def _show(rows: list[Row]) -> None:
    """Print a table of the checks, and exit with `EXIT_REFUSED` if one of them refuses."""
    width = max(len(row.check) for row in rows)
    for row in rows:
        verdict = typer.style(f"{row.verdict:8}", fg=COLOURS[row.verdict])
        typer.echo(f"{verdict} {row.check:{width}}  {row.finding}")
    num_refused = sum(row.verdict == "refused" for row in rows)
    if num_refused:
        typer.echo(f"preflight: {num_refused} of {len(rows)} checks refuse")
        raise typer.Exit(EXIT_REFUSED)
    typer.echo("preflight: ready")


def _job(facts: Path | None, node_names: list[str]) -> Job:
    from nemo_grpo.launch.node_facts import collect
    from nemo_grpo.launch.preflight import Job, read_facts

    if facts is None:
        this_machine = collect()
        return Job([this_machine["node"]], [this_machine])
    return Job(node_names, read_facts(facts))
