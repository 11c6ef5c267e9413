"""Rehearse every shipped cluster recipe, one after the other, and print a table.

    python -m benchmarks.rehearse_all --nemo-rl DIR [--sampler] [--folder rehearsals/all] [RECIPE...]

Resumable: a recipe with a result in the folder is skipped; it has none if Ray did not start. About two
minutes each on two cores.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAPERS = ("cw_grpo", "erpo", "tr_grpo", "gpg")
RAY_DID_NOT_START = 69
VERDICTS = {0: "all stages", 1: "failed", 2: "refused"}
ERROR = re.compile(r"^\w*(?:Error|Exception|Failed)\b.*", re.MULTILINE)
COLUMNS = ("recipe", "verdict", "layout", "gen_kl_error by step", "groups with signal", "seconds", "said")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipes", nargs="*", type=Path)
    parser.add_argument("--nemo-rl", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=ROOT / "rehearsals" / "all")
    parser.add_argument("--sampler", action="store_true", help="the stand-in samples")
    given = parser.parse_args()
    shipped = (path for paper in PAPERS for path in (ROOT / "recipes" / paper).glob("*.yaml"))
    recipes = given.recipes or sorted(shipped)
    given.folder.mkdir(parents=True, exist_ok=True)
    for recipe in recipes:
        result = given.folder / f"{recipe.stem}.json"
        if not result.exists():
            found = rehearse(recipe, given)
            print(row(found), flush=True)
            if found["code"] != RAY_DID_NOT_START:
                result.write_text(json.dumps(found, indent=1))
    results = [json.loads(path.read_text()) for path in sorted(given.folder.glob("*.json"))]
    print(f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", *map(row, results), sep="\n")
    return int(any(result["code"] not in (0, 2) for result in results))


def rehearse(recipe: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Rehearse a recipe; returns exit code, seconds, the rehearsal's record and its last error line."""
    folder = given.folder / f"{recipe.stem}-{int(time.time())}"
    command = [sys.executable, "-m", "nemo_grpo.cli", "rehearse", str(recipe), "--folder", str(folder)]
    command += ["--nemo-rl", str(given.nemo_rl), *(["--sampler"] if given.sampler else [])]
    start = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)  # it detects that it is stuck
    record = folder / "rehearsal.json"
    return {
        "name": recipe.stem,
        "code": done.returncode,
        "took": round(time.monotonic() - start),
        "error": done.stderr.strip().rpartition("\n")[2],
        **(json.loads(record.read_text()) if record.exists() else {"stages": [], "layout": ""}),
    }


def row(result: dict[str, Any]) -> str:
    """Write one line of the table."""
    proofs = {stage["name"]: stage["proof"] for stage in result["stages"]}
    failed = [stage for stage in result["stages"] if not stage["ok"]]
    said = result["error"] if result["code"] == 2 else ""
    if failed:
        reasons = ERROR.findall(failed[0]["proof"]) or failed[0]["proof"].splitlines()
        said = f"{failed[0]['name']}: {reasons[-1]}"
    cells = (
        result["name"],
        VERDICTS.get(result["code"], f"exit code {result['code']}"),
        result["layout"],
        proofs.get("refit", "").partition(";")[0].removeprefix("gen_kl_error ") if not failed else "",
        proofs.get("update", "").partition("groups with signal ")[2] if not failed else "",
        str(result["took"]),
        said.replace("|", "/"),
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
