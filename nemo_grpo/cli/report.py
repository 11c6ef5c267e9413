"""``nemo-grpo report``: curves and tables of finished or running runs."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Folders of runs, comparisons or sweeps.", show_default=False),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="HTML file; its pictures go to plots/ beside it.")
    ] = Path("report.html"),
) -> None:
    """Compare runs in one HTML file: learning curves, diagnostics, a table over seeds.

    Runs that differ only in their seed become one line with a band.

    Example: nemo-grpo report runs/grpo-s0 runs/grpo-s1 runs/gpg-s0 -o compare/report.html
    """
    from nemo_grpo.report.report import write_report

    written = write_report(runs, output)
    typer.echo(f"wrote {written} and {written.parent / 'plots'}/*.png")
