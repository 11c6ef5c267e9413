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
    names: Annotated[
        list[str], Argument(metavar="NAME...", help="Data sets; `nemo-grpo data list` shows the names.")
    ],
    out: Annotated[Path, Option(help="Folder that gets NAME.jsonl and NAME.manifest.json.")] = Path("data"),
    revision: Annotated[
        str | None,
        Option(help="Branch, tag or commit to read. The default is the pinned one, else the newest."),
    ] = None,
    source: Annotated[
        Path | None,
        Option(
            envvar="NEMO_GRPO_DATA_SOURCE",
            help="Local copy of the source, or a folder with a copy for each name. No network is used.",
        ),
    ] = None,
    generate: Annotated[
        bool,
        Option("--generate", help="Generate kk-3to7 or kk-3to7-test here, in place of the published file."),
    ] = False,
    force: Annotated[bool, Option("--force", help="Prepare again even what is up to date.")] = False,
    any_count: Annotated[
        bool, Option("--any-count", help="Accept another number of problems than the paper states.")
    ] = False,
) -> None:
    """Write data sets as JSONL files, with manifests of their sources, rules, counts and hashes.

    Example: nemo-grpo data prepare open-rs aime24 amc23 --out data
    """
    from nemo_grpo.data import Request, check_copies, find_source
    from nemo_grpo.data import prepare as prepare_one

    # Check all names first, so that a typo in the last one does not show after an hour of downloads.
    for name in names:
        data_set = find_source(name)
        if generate:
            data_set.generate()
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
        name = source.name
        aliases = [alias for alias, target in ALIASES.items() if target == source.name]
        if aliases:
            name += f" ({', '.join(aliases)})"
        typer.echo(f"{name}: {source.task}, {source.use}, {source.paper}")
        count = "" if source.expected is None else f"{source.expected} problems of "
        typer.echo(f"  {count}{source.origin.label}")


@app.command()
def verify(
    folder: Annotated[Path, Argument(metavar="DIR", help="Folder of prepared files.")],
) -> None:
    """Check prepared files against their manifests.

    Exit codes: 0 all files are as they were written; 2 one differs.
    """
    from nemo_grpo.data import verify as verify_folder

    results = verify_folder(folder)
    for name, complaint in results.items():
        if complaint is None:
            typer.echo(f"{typer.style('ok', fg='green')}  {name}")
        else:
            typer.echo(f"{typer.style('wrong', fg='red')}  {name}: {complaint}")
    if any(results.values()):
        raise typer.Exit(EXIT_USAGE)
