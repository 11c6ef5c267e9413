"""``nemo-grpo doctor``: whether this package fits a NeMo-RL tree."""

import os
from pathlib import Path
from typing import Annotated

import typer

from nemo_grpo.support.errors import UserError

EXIT_BROKEN, EXIT_UNTESTED = 1, 3
CODES = {"supported": 0, "untested": EXIT_UNTESTED, "broken": EXIT_BROKEN}
COLOURS = {
    "there": "green",
    "changed": "yellow",
    "gone": "yellow",
    "supported": "green",
    "untested": "yellow",
}


def doctor(
    nemo_rl: Annotated[Path | None, typer.Option(help="NeMo-RL's repository. Default: NEMO_RL_SRC.")] = None,
    changes: Annotated[bool, typer.Option("--changes", help="Only what is changed or gone.")] = False,
) -> None:
    """Compare a NeMo-RL tree with what this package calls, reads and replaces of it.

    Reads the tree's syntax: no import, no GPU, a few seconds. One line for each name, against the tested
    version with the fewest differences: there, changed (how) or gone; then the verdict.
    Red: a run would fail there, or silently do something else.

    Example: nemo-grpo doctor --nemo-rl ../RL --changes

    Exit codes: 0 supported: exactly a tested version's interface; 3 untested: different, and no difference is
    known to break anything; 1 broken; 2 no NeMo-RL in the folder.
    """
    from nemo_grpo.nemorl.doctor import diagnose_tree
    from nemo_grpo.nemorl.host_api import TESTED

    given = nemo_rl or (Path(os.environ["NEMO_RL_SRC"]) if os.environ.get("NEMO_RL_SRC") else None)
    if given is None:
        raise UserError("--nemo-rl is missing and NEMO_RL_SRC is not set; give the folder of NeMo-RL's clone")
    found = diagnose_tree(given)
    for finding in found.findings:
        if changes and finding.state == "there":
            continue
        colour = "red" if finding.breaks else COLOURS[finding.state]
        needed = f" [{finding.part}]" if finding.breaks else ""
        typer.echo(f"{typer.style(f'{finding.state:8}', fg=colour)} {finding.name}{needed}")
        for line in (finding.how, finding.why if finding.state != "there" else ""):
            if line:
                typer.echo(f"         {line}")
    broken = sum(finding.breaks for finding in found.findings)
    verdict = typer.style(found.verdict, fg=COLOURS.get(found.verdict, "red"))
    typer.echo(
        f"doctor: {verdict}; {len(found.differences)} of {len(found.findings)} names differ from "
        f"{TESTED[found.like]}, {broken} of them break"
    )
    raise typer.Exit(CODES[found.verdict])
