"""``nemo-grpo data``: the papers' data sets as JSONL files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from nemo_grpo.support.errors import EXIT_USAGE

if TYPE_CHECKING:
    from nemo_grpo.data import Prepared

app = typer.Typer(name="data", no_args_is_help=True, help="Prepare the papers' training and evaluation sets.")


@app.command()
def prepare(
    names: Annotated[list[str], Argument(metavar="NAME...", help="See `nemo-grpo data list`.")],
    out: Annotated[Path, Option(help="Folder of NAME.jsonl and NAME.manifest.json.")] = Path("data"),
    revision: Annotated[str | None, Option(help="Branch, tag or commit; else pinned or newest.")] = None,
    source: Annotated[
        Path | None,
        Option(envvar="NEMO_GRPO_DATA_SOURCE", help="Local copy, or a folder of copies by name: no network."),
    ] = None,
    generate: Annotated[bool, Option("--generate", help="kk-3to7, kk-3to7-test: no network.")] = False,
    force: Annotated[bool, Option("--force", help="Prepare again even if up to date.")] = False,
    any_count: Annotated[bool, Option("--any-count", help="Accept other numbers than the papers'.")] = False,
) -> None:
    """Write data sets as JSONL, with manifests of sources, rules, counts and hashes.

    Example: nemo-grpo data prepare open-rs aime24 amc23 --out data
    """
    from nemo_grpo.data import Request, check_copies, find_source
    from nemo_grpo.data import prepare as prepare_one

    for name in names:
        found = find_source(name)  # a typo in any name stops it before the first download
        if generate:
            found.generate()
    request = Request(
        out=out, revision=revision, source=source, generate=generate, force=force, any_count=any_count
    )
    check_copies(names, request)
    for name in names:
        _show(prepare_one(name, request))


def _show(done: Prepared) -> None:
    manifest = done.manifest
    if not done.fresh:
        typer.echo(f"{done.path}: {manifest['num_problems']} problems, up to date")
        return
    typer.echo(f"{done.path}: {manifest['num_problems']} problems from {manifest['source']}")
    for rule in manifest["filters"]:
        if rule["before"] != rule["after"]:
            typer.echo(f"  {rule['before']} -> {rule['after']}: {rule['rule']} ({rule['cited']})")


@app.command("list")
def list_() -> None:
    """List every data set with its use, source and paper."""
    from nemo_grpo.data import ALIASES, SOURCES

    for source in SOURCES.values():
        also = ", ".join(alias for alias, name in ALIASES.items() if name == source.name)
        name = f"{source.name} ({also})" if also else source.name
        typer.echo(f"{name}: {source.task}, {source.use}, {source.paper}")
        count = "" if source.expected is None else f"{source.expected} problems of "
        typer.echo(f"  {count}{source.origin.label}")


@app.command()
def verify(
    folder: Annotated[Path, Argument(metavar="DIR", help="Folder of prepared files.")],
) -> None:
    """Check prepared files against their manifests; exit code 2 if any differs."""
    from nemo_grpo.data import verify as verify_folder

    results = verify_folder(folder)
    for name, complaint in results.items():
        mark = typer.style("ok", fg="green") if complaint is None else typer.style("wrong", fg="red")
        typer.echo(f"{mark}  {name}{'' if complaint is None else f': {complaint}'}")
    if any(results.values()):
        raise typer.Exit(EXIT_USAGE)
