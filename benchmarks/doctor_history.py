"""Replay ``nemo-grpo doctor`` on NeMo-RL's history, and compare its verdicts with the adapter's tests.

    python benchmarks/doctor_history.py --nemo-rl CLONE [--folder DIR] [--first v0.6.0] [--last 7ea279abf]
    python benchmarks/doctor_history.py --nemo-rl CLONE [--folder DIR] --test COMMIT... [--python PYTHON]
    python benchmarks/doctor_history.py --nemo-rl CLONE --draw NUMBER

The first form diagnoses every commit that touches nemo_rl/ and prints the tables. The second one runs
`TESTS` on commits, with the adapter's own check switched off, and keeps what fails in the folder, for the
tables; about two minutes a commit. The third one prints commits to test, one of each equal part of the
history, drawn with `SEED`.
"""

import argparse
import ast
import json
import os
import random
import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from nemo_grpo.nemorl.doctor import Diagnosis, diagnose, observe
from nemo_grpo.nemorl.source import Tree

ROOT = Path(__file__).parents[1]
PARTS = ("nemo_rl", "examples/configs")
"""What doctor reads of NeMo-RL's repository."""
OF_TESTS = ("tests/__init__.py", "tests/unit")
"""What the adapter's tests import besides."""
TESTS = (
    *("test_training.py", "test_refit.py", "test_entropy.py", "test_recipes.py", "test_sampling.py"),
    *("test_environments.py", "test_data_plane.py"),
)
"""Files of tests/nemo_rl that run the hooks and calls; not the whole runs."""
WORKERS = "test_ray_workers.py"
"""The real policy's overrides on Ray workers."""
CHOSEN = "not every_name_that_we_use and (not own_checks or cw_grpo-r1 or erpo-qwen2.5-1.5b)"
"""Without the adapter's own check, and with three recipes of the shipped ones."""
UNCHECKED = """
import sys, pytest
from nemo_grpo.nemorl import compat
compat.require = lambda part: None
sys.exit(pytest.main(sys.argv[1:]))
"""
"""The tests' verdict must not be doctor's."""
ABSENT = ("decord",)
"""Packages that older commits import and .venv-nemo-rl lacks; empty modules stand in."""
STAND_IN = """
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
"""
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)(?: - (.*))?$", re.MULTILINE)
PATIENCE = 1500
SEED = 0
parse = lru_cache(maxsize=300)(ast.parse)
"""Neighbouring commits share most files."""
VERDICTS = ("supported", "untested", "broken")


class Row(NamedTuple):
    """One commit: its diagnosis, and how many seconds that took."""

    commit: str
    date: str
    found: Diagnosis
    seconds: float

    @property
    def breaks(self) -> dict[str, str]:
        """Name -> what breaks."""
        return {one.name: one.how or one.state for one in self.found.findings if one.breaks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--nemo-rl", type=Path, required=True, help="NeMo-RL's clone, with its history")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "doctor_history")
    parser.add_argument("--first", default="v0.6.0")
    parser.add_argument("--last", default="7ea279abf")
    parser.add_argument("--test", nargs="+", default=[], metavar="COMMIT")
    parser.add_argument("--draw", type=int, default=0, metavar="NUMBER")
    parser.add_argument("--workers", action="store_true", help=f"with {WORKERS}, which is half of the time")
    parser.add_argument("--python", type=Path, default=ROOT / ".venv-nemo-rl" / "bin" / "python")
    given = parser.parse_args()
    if given.draw:
        print(*drawn([line.split()[0] for line in commits(given)], given.draw))
        return
    given.folder.mkdir(parents=True, exist_ok=True)
    for commit in given.test:
        with checked_out(given.nemo_rl, commit, PARTS + OF_TESTS) as tree:
            label = tested(tree, given.python, [*TESTS, *([WORKERS] if given.workers else [])])
        (given.folder / f"{commit}.json").write_text(json.dumps(label, indent=1) + "\n")
        print(commit, label["outcome"], flush=True)
    if not given.test:
        history = [diagnosed(given.nemo_rl, *line.split()) for line in commits(given)]
        labels = {path.stem: json.loads(path.read_text()) for path in given.folder.glob("*.json")}
        print("\n\n".join("\n".join(table) for table in tables(history, labels)))


def git(repository: Path, *arguments: str) -> str:
    command = ["git", "-C", str(repository), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def commits(given: argparse.Namespace) -> list[str]:
    """``HASH DATE`` of the first commit and of all that touch the package after it, oldest first."""
    line = ["--format=%h %cs", "--abbrev=9"]
    first = git(given.nemo_rl, "log", "-1", *line, given.first)
    span = f"{given.first}..{given.last}"
    return (first + git(given.nemo_rl, "log", "--reverse", *line, span, "--", "nemo_rl")).splitlines()


def drawn(history: Sequence[str], number: int) -> list[str]:
    """A commit of each of ``number`` equal parts of the history."""
    rng, ends = random.Random(SEED), [len(history) * at // number for at in range(number + 1)]
    return [rng.choice(history[start:end]) for start, end in pairwise(ends)]


@contextmanager
def checked_out(repository: Path, commit: str, parts: tuple[str, ...] = PARTS) -> Iterator[Path]:
    """Parts of a commit in a folder."""
    there = [part for part in parts if git(repository, "ls-tree", "--name-only", commit, part)]
    pack = ["git", "-C", str(repository), "archive", commit, *there]
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(pack, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        yield Path(folder)


def diagnosed(repository: Path, commit: str, date: str) -> Row:
    with checked_out(repository, commit) as tree:
        begun = time.monotonic()
        found = diagnose(observe(Tree(tree, "nemo_rl", parse)))
        return Row(commit, date, found, time.monotonic() - begun)


def tested(tree: Path, python: Path, files: list[str]) -> dict[str, Any]:
    """Names and reasons of the tests that fail on a tree."""
    for package in ABSENT:
        (tree / f"{package}.py").write_text(STAND_IN)
    arguments = ["-m", "nemo_rl", "-W", "ignore", "-o", "filterwarnings=", "-rfE", "-p", "no:cacheprovider"]
    arguments += ["--continue-on-collection-errors", "-k", CHOSEN]
    arguments += [f"tests/nemo_rl/{name}" for name in files]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NEMO_RL_SRC": str(tree), "COLUMNS": "300"}
    done = subprocess.run(
        [str(python), "-c", UNCHECKED, *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    failed = dict(FAILED.findall(done.stdout))
    return {"code": done.returncode, "outcome": done.stdout.strip().rpartition("\n")[2], "failed": failed}


def tables(history: list[Row], labels: dict[str, dict[str, Any]]) -> Iterator[list[str]]:
    """Counts, what changed from commit to commit, and doctor against the tests."""
    counts, seconds = Counter(row.found.verdict for row in history), [row.seconds for row in history]
    first, last = history[0], history[-1]
    yield [
        f"{len(history)} commits from {first.commit} ({first.date}) to {last.commit} ({last.date}): "
        f"{', '.join(f'{counts[verdict]} {verdict}' for verdict in VERDICTS)}.",
        f"{max(seconds):.1f} s for the slowest tree, {sum(seconds) / len(seconds):.1f} s on average; files "
        "that two commits share are parsed once.",
    ]
    moves = [
        changed(before, row)
        for before, row in zip([None, *history], history, strict=False)
        if is_change(before, row)
    ]
    yield head("commit", "date", "verdict", "against", "differ", "what breaks, or fits again") + moves
    judged = [row for row in history if row.commit in labels]
    yield head("commit", "doctor", "tests", "failing") + [labelled(row, labels[row.commit]) for row in judged]
    found = Counter((row.found.verdict, labels[row.commit]["code"] == 0) for row in judged)
    lines = [f"| {one} | {found[one, True]} | {found[one, False]} |" for one in VERDICTS]
    yield head("doctor", "tests pass", "tests fail") + lines


def head(*columns: str) -> list[str]:
    return [f"| {' | '.join(columns)} |", f"{'|---' * len(columns)}|"]


def is_change(before: Row | None, row: Row) -> bool:
    if before is None:
        return True
    return before.found.verdict != row.found.verdict or set(before.breaks) != set(row.breaks)


def changed(before: Row | None, row: Row) -> str:
    was = before.breaks if before else {}
    news = [f"`{short(name)}`: {how}" for name, how in row.breaks.items() if name not in was]
    news += [f"fits: `{short(name)}`" for name in was if name not in row.breaks]
    found = row.found
    cells = (row.commit, row.date, found.verdict, found.like, str(len(found.differences)))
    return f"| {' | '.join(cells)} | {'<br>'.join(news).replace('|', '/')} |"


def short(name: str) -> str:
    return name.partition(":")[2] or name


def labelled(row: Row, label: dict[str, Any]) -> str:
    reasons = Counter(re.sub(r"\s+", " ", reason)[:90] for reason in label["failed"].values())
    text = "; ".join(f"{number}x {reason}" for reason, number in reasons.most_common(3)).replace("|", "/")
    return f"| {row.commit} | {row.found.verdict} | {label['outcome'].strip('= ')} | {text} |"


if __name__ == "__main__":
    main()
