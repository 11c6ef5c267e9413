"""``nemo-grpo preflight``: a table of checks before a job starts."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from nemo_grpo.cli.recipe import Overrides, RecipeFile

if TYPE_CHECKING:
    from nemo_grpo.launch.preflight import Job

EXIT_REFUSED = 69
"""Exit code when a check refuses; also in slurm/lib/job.sh."""
COLOURS = {"ok": "green", "note": "yellow", "refused": "red"}


def preflight(
    recipe: RecipeFile,
    overrides: Overrides = None,
    facts: Annotated[Path | None, Option(help="Folder of the nodes' NODE.json; else this machine.")] = None,
    nodes: Annotated[str, Option(help="Names of the job's nodes, with commas.")] = "",
    settings: Annotated[Path | None, Option(help="File that gets the run's folders, for a shell.")] = None,
) -> None:
    """Check plan, data, nodes, GPUs, folders, space and versions before a job uses its GPUs.

    Jobs run it before anything else. Without options it checks this machine alone.

    Example: nemo-grpo preflight recipes/quickstart.yaml

    Exit codes: 0 may start; 2 the recipe is wrong; 69 a check refused.
    """
    from nemo_grpo.launch.preflight import check_job, shell_settings
    from nemo_grpo.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or [])
    rows = check_job(loaded, _job(facts, nodes))
    width = max(len(row.check) for row in rows)
    for row in rows:
        verdict = typer.style(f"{row.verdict:8}", fg=COLOURS[row.verdict])
        typer.echo(f"{verdict} {row.check:{width}}  {row.found}")
    refused = sum(row.verdict == "refused" for row in rows)
    typer.echo(f"preflight: {f'{refused} of {len(rows)} checks refuse' if refused else 'ready'}")
    if refused:
        raise typer.Exit(EXIT_REFUSED)
    if settings is not None:
        settings.write_text(shell_settings(loaded))


def _job(facts: Path | None, nodes: str) -> Job:
    from nemo_grpo.launch.node_facts import collect
    from nemo_grpo.launch.preflight import Job, read_facts

    if facts is None:
        this_machine = collect()
        return Job([this_machine["node"]], [this_machine])
    return Job(nodes.split(",") if nodes else [socket.gethostname()], read_facts(facts))
