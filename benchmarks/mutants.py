"""Plant single errors in source files and see which of them the given tests do not notice.

    python benchmarks/mutants.py nemo_grpo/core/kl.py nemo_grpo/core/importance.py \
        --tests tests/unit/core tests/unit/variants [-n 40] [--seed 0] [--output FILE.md]

Every mutant is a copy of the repository with one change: an operator, a comparison, a constant, a condition,
a call's keyword, or a statement that is left out. A mutant is killed if the tests fail or run three times as
long as without it. Which of the survivors are equivalent is for a person to say.
"""

from __future__ import annotations

import argparse
import ast
import copy
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

import pytest
import torch  # noqa: F401  # imported once, for all forks

ROOT = Path(__file__).parents[1]
COPIED = (
    *("nemo_grpo", "checkpoints_conv", "recipes", "tests", "benchmarks", "slurm", "scripts", "docs"),
    "pyproject.toml",
)
SLACK = 30.0
"""Seconds added to three times the tests' own duration."""

OPERATORS: dict[type, tuple[type, ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult,),
    ast.Mod: (ast.FloorDiv,),
    ast.Pow: (ast.Mult,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
UNREAD_KEYWORDS = (None, "description")
"""``**mapping``, and a field's documentation."""


class Mutant(NamedTuple):
    """One change. Attributes: file; line; before, after: the statement's text; source: the whole file."""

    file: Path
    line: int
    before: str
    after: str
    source: str


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--tests", nargs="+", required=True, help="what pytest gets")
    parser.add_argument("-n", type=int, default=40, help="mutants, over all files together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="Markdown table of the survivors")
    given = parser.parse_args()
    possible = [mutant for file in given.files for mutant in mutants(file.resolve().relative_to(ROOT))]
    chosen = random.Random(given.seed).sample(possible, min(given.n, len(possible)))
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        folder = copied(Path(scratch))
        start = time.monotonic()
        if not passes(folder, given.tests, None):
            sys.exit("the tests fail without a mutant")
        limit = 3 * (time.monotonic() - start) + SLACK
        survivors = [mutant for mutant in chosen if survives(folder, mutant, given.tests, limit)]
    said = f"{len(survivors)} of {len(chosen)} mutants survive, seed {given.seed}; {len(possible)} in all"
    rows = [f"| {m.file}:{m.line} | `{m.before}` | `{m.after}` |" for m in survivors]
    text = "\n".join([said, "", "| where | before | after |", "|---|---|---|", *rows, ""])
    print("", text, sep="\n")
    if given.output:
        given.output.write_text(text)
    return 0


def copied(folder: Path) -> Path:
    """The repository without what tests do not need."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, folder / name)
    return folder


def survives(folder: Path, mutant: Mutant, tests: list[str], limit: float) -> bool:
    path = folder / mutant.file
    original = path.read_text()
    path.write_text(mutant.source)
    try:
        found = passes(folder, tests, limit)
    finally:
        path.write_text(original)
    verdict = "SURVIVES" if found else "killed"
    print(f"{verdict:8} {mutant.file}:{mutant.line}: {mutant.before} -> {mutant.after}", flush=True)
    return found


def passes(folder: Path, tests: list[str], limit: float | None) -> bool:
    """Run the tests in a fork of this process, which has imported what takes longest."""
    child = os.fork()
    if child == 0:
        _run(folder, tests)
    deadline = math.inf if limit is None else time.monotonic() + limit
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return False
        time.sleep(0.05)
    return ended[1] == 0


def _run(folder: Path, tests: list[str]) -> NoReturn:
    """Never returns: ends the fork with pytest's exit code."""
    code = 1
    try:
        os.setsid()
        os.chdir(folder)
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        os.environ |= {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
        sys.dont_write_bytecode = True
        sys.path.insert(0, str(folder))
        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))
    finally:
        os._exit(code)


# ---------------------------------------------------------------------- changes


def mutants(file: Path) -> Iterator[Mutant]:
    """Every mutant of a file."""
    tree = ast.parse((ROOT / file).read_text())
    unread = {id(node) for part in annotations(tree) for node in ast.walk(part)}
    for number, node in enumerate(ast.walk(tree)):
        for change in changes(node) if id(node) not in unread else ():
            changed = copy.deepcopy(tree)
            twin = next(each for at, each in enumerate(ast.walk(changed)) if at == number)
            line = getattr(node, "lineno", 0)
            before, after = change(twin)
            yield Mutant(file, line, before, after, ast.unparse(changed))


def annotations(tree: ast.AST) -> Iterator[ast.AST]:
    """Types, which nothing reads when the program runs."""
    for node in ast.walk(tree):
        for field in ("annotation", "returns"):
            if isinstance(part := getattr(node, field, None), ast.AST):
                yield part


Change = Callable[[ast.AST], tuple[str, str]]


def changes(node: ast.AST) -> Iterator[Change]:
    """What can be changed about a node; each function changes it and returns its text before and after."""
    if isinstance(node, (ast.BinOp, ast.BoolOp, ast.AugAssign)):
        for new in OPERATORS.get(type(node.op), ()):
            yield lambda twin, new=new: _edited(twin, lambda t: setattr(t, "op", new()))
    elif isinstance(node, ast.Compare):
        for new in OPERATORS.get(type(node.ops[0]), ()):
            yield lambda twin, new=new: _edited(twin, lambda t: t.ops.__setitem__(0, new()))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not, ast.Invert)):
        yield lambda twin: _edited(twin, _without_operator)
    elif isinstance(node, (ast.If, ast.IfExp)):
        yield lambda twin: _edited(twin, _negated, of="test")
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield lambda twin: _edited(twin, lambda t: setattr(t, "value", t.value + 1))
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield lambda twin: _edited(twin, lambda t: setattr(t, "value", not t.value))
    elif isinstance(node, ast.Call) and node.keywords and node.keywords[-1].arg not in UNREAD_KEYWORDS:
        yield lambda twin: _edited(twin, lambda t: t.keywords.pop())
    if isinstance(node, (ast.FunctionDef, ast.For, ast.While, ast.If, ast.With)):
        for at, statement in enumerate(node.body):
            if _can_be_left_out(statement):
                yield lambda twin, at=at: _left_out(twin, at)


def _can_be_left_out(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr):
        return not isinstance(statement.value, ast.Constant)  # a docstring
    return isinstance(statement, (ast.AugAssign, ast.If, ast.Raise))


def _edited(node: ast.AST, edit: Callable[[ast.AST], object], of: str = "") -> tuple[str, str]:
    shown = getattr(node, of) if of else node
    before = ast.unparse(shown)
    edit(node)
    return _line(before), _line(ast.unparse(getattr(node, of) if of else node))


def _without_operator(node: ast.AST) -> None:
    """-x and ~x become x * 1, `not x` becomes `not not x`."""
    assert isinstance(node, ast.UnaryOp)
    if isinstance(node.op, ast.Not):
        node.operand = ast.UnaryOp(ast.Not(), node.operand)
    else:
        node.op, node.operand = ast.UAdd(), ast.BinOp(node.operand, ast.Mult(), ast.Constant(1))


def _negated(node: ast.AST) -> None:
    assert isinstance(node, (ast.If, ast.IfExp))
    node.test = ast.UnaryOp(ast.Not(), node.test)


def _left_out(node: ast.AST, at: int) -> tuple[str, str]:
    body = node.body  # type: ignore[attr-defined]
    before, body[at] = ast.unparse(body[at]), ast.Pass()
    return _line(before), "pass"


def _line(text: str) -> str:
    return " ".join(text.split())[:90].replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
