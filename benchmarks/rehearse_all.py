"""Rehearse every shipped cluster recipe, one after the other, and write a table.

    python benchmarks/rehearse_all.py --nemo-rl DIR [--folder rehearsals/all] [RECIPE...]

Resumable: a recipe whose result is in the folder is left out. About two minutes each on two cores.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAPERS = ("cw_grpo", "erpo", "tr_grpo", "gpg")
PATIENCE = 900
ROW = re.compile(r"^│ (?P<stage>[a-z ]+?) +│ (?P<verdict>ok|failed) +│ (?P<proof>.*?) +│$", re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipes", nargs="*", type=Path)
    parser.add_argument("--nemo-rl", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=ROOT / "rehearsals" / "all")
    parser.add_argument("--sampler", action="store_true", help="the stand-in samples")
    given = parser.parse_args()
    recipes = given.recipes or sorted(
        path for paper in PAPERS for path in (ROOT / "recipes" / paper).glob("*.yaml")
    )
    given.folder.mkdir(parents=True, exist_ok=True)
    for recipe in recipes:
        result = given.folder / f"{recipe.stem}.json"
        if not result.exists():
            result.write_text(json.dumps(rehearse(recipe, given), indent=1))
            print(line(json.loads(result.read_text())), flush=True)
    results = [json.loads(path.read_text()) for path in sorted(given.folder.glob("*.json"))]
    print(table(results))
    return int(any(result["code"] == 1 for result in results))


def rehearse(recipe: Path, given: argparse.Namespace) -> dict[str, object]:
    """Exit code, seconds, verdict of each stage, and what the command said."""
    folder = given.folder / f"{recipe.stem}-{int(time.time())}"
    command = [
        sys.executable,
        "-m",
        "nemo_grpo.cli",
        "rehearse",
        str(recipe),
        "--nemo-rl",
        str(given.nemo_rl),
    ]
    command += ["--folder", str(folder), *(["--sampler"] if given.sampler else [])]
    start = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    stages = {found["stage"]: [found["verdict"], found["proof"]] for found in ROW.finditer(done.stdout)}
    return {
        "recipe": recipe.stem,
        "code": done.returncode,
        "seconds": round(time.monotonic() - start),
        "stages": stages,
        "error": done.stderr.strip().splitlines()[-1:] if done.returncode == 2 else [],
        "layout": next((x for x in done.stdout.splitlines() if x.startswith("layout: ")), ""),
        "rollouts": "the stand-in" if given.sampler else "vLLM",
    }


def line(result: dict[str, object]) -> str:
    """One row of the table."""
    stages = result["stages"]
    assert isinstance(stages, dict)
    verdict = {0: "all stages", 1: "failed", 2: "refused"}.get(int(str(result["code"])), "?")
    failed = next((f"{name}: {proof}" for name, (how, proof) in stages.items() if how == "failed"), "")
    refit = stages.get("refit", ["", ""])[1].partition(";")[0].removeprefix("gen_kl_error ")
    signal = stages.get("advantage", ["", ""])[1].removeprefix("groups with signal ")
    layout = str(result["layout"]).rpartition("rehearsed as ")[2] or "as it is"
    said = failed or " ".join(map(str, result["error"]))  # type: ignore[call-overload]
    return (
        f"| {result['recipe']} | {verdict} | {layout} | {refit} | {signal} | {result['seconds']} | {said} |"
    )


def table(results: list[dict[str, object]]) -> str:
    """All rows, with what stands above them."""
    head = (
        "| recipe | verdict | layout | gen_kl_error by step | groups with signal | seconds | said |\n"
        + "|---" * 7
        + "|"
    )
    return "\n".join([head, *map(line, results)])


if __name__ == "__main__":
    sys.exit(main())
