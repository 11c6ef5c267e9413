"""Plant single errors in source files and see which of them the given tests do not notice.

    python benchmarks/mutants.py nemo_grpo/core checkpoints_conv/verify.py \
        --tests tests/unit/core tests/unit/variants [--covered-by .coverage] [-n 40] [--seed 0] [--skip 0] \
        [--output FILE.md]

Every mutant is a copy of the repository with one change: an operator, a comparison, a constant, a condition,
a call's keyword, or a statement that is left out. A mutant is killed if the tests fail or need more than
three times the CPU seconds that they need without it. Which of the survivors are equivalent is for a person
to say.

With ``--covered-by`` the tests that reach the changed line come first, and ``--tests`` only where those pass.
The file is written by coverage.py with ``dynamic_context = test_function`` and, for tests' other processes,
``context = ${PYTEST_CURRENT_TEST-}``.
"""

import argparse
import ast
import os
import random
import resource
import shutil
import signal
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest
import transformers.models.qwen2.modeling_qwen2  # noqa: F401  # imported once, with torch, for all forks

ROOT = Path(__file__).parents[1]
COPIED = (
    *("nemo_grpo", "checkpoints_conv", "recipes", "tests", "benchmarks", "slurm", "scripts", "docs"),
    *("pyproject.toml", "README.md", "Makefile"),
)
SLACK = 60
"""CPU seconds added to three times what the tests need."""
MOST = (60, 6)
"""Tests of a line that are tried before all tests: without and with whole runs."""

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
UNREAD_KEYWORDS = (None, "description", "frozen")
"""``**mapping``, a field's documentation, and what only forbids an assignment that nobody makes."""


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
    parser.add_argument("files", nargs="+", type=Path, help="or folders: all their Python files")
    parser.add_argument("--tests", nargs="+", required=True, help="what pytest gets")
    parser.add_argument("--covered-by", type=Path, help="coverage.py's file, with a context for each test")
    parser.add_argument("-n", type=int, default=40, help="mutants, over all files together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skip", type=int, default=0, help="the first ones, judged before")
    parser.add_argument("--output", type=Path, help="Markdown table of the survivors")
    given = parser.parse_args()
    files = [file for each in given.files for file in (sorted(each.rglob("*.py")) or [each])]
    possible = [place for file in files for place in places(file.resolve().relative_to(ROOT))]
    drawn = random.Random(given.seed).sample(possible, min(given.n, len(possible)))
    chosen = [mutant_at(*place) for place in drawn[given.skip :]]
    reached = covering(given.covered_by) if given.covered_by else {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        folder = copied(Path(scratch))
        passed, seconds = passes(folder, given.tests, None)
        if not passed:
            sys.exit("the tests fail without a mutant")
        limit = 3 * int(seconds) + SLACK
        survivors = [
            mutant
            for mutant in chosen
            if survives(folder, mutant, [*stages_of(mutant, reached), given.tests], limit)
        ]
    said = f"{len(survivors)} of {len(chosen)} mutants survive, seed {given.seed}; {len(possible)} in all"
    rows = [f"| {m.file}:{m.line} | `{m.before}` | `{m.after}` |" for m in survivors]
    text = "\n".join([said, "", "| where | before | after |", "|---|---|---|", *rows, ""])
    print("", text, sep="\n")
    if given.output:
        given.output.write_text(text)
    return 0


def covering(data: Path) -> dict[str, set[tuple[Path, int]]]:
    """The lines that each test reaches, by coverage.py's file."""
    query = (
        "select path, context, numbits from line_bits join file on file.id = file_id "
        "join context on context.id = context_id"
    )
    reached: dict[str, set[tuple[Path, int]]] = {}
    with closing(sqlite3.connect(data)) as found:
        for path, context, bits in found.execute(query):
            parts = Path(path).parts
            file = Path(*parts[next(at for at, part in enumerate(parts) if part in COPIED) :])
            lines = (8 * at + bit for at, byte in enumerate(bits) for bit in range(8) if byte >> bit & 1)
            if test := test_of(context):
                reached.setdefault(test, set()).update((file, line) for line in lines)
    return reached


@cache
def test_of(context: str) -> str | None:
    """``tests/x/test_y.py::test_z`` by what coverage.py calls it."""
    static, _, dynamic = context.rpartition("|")
    module, _, function = dynamic.partition(".")
    if function.startswith("test_") and (found := list((ROOT / "tests").rglob(f"{module}.py"))):
        return f"{found[0].relative_to(ROOT)}::{function}"
    name, _, _ = (static or dynamic).partition("[")
    return name.partition(" ")[0] if "::" in name else None


def stages_of(mutant: Mutant, reached: dict[str, set[tuple[Path, int]]]) -> Iterator[list[str]]:
    """Tests that reach the line, or its file where it is read once for all; the least of each first."""
    by_line = [test for test, places in reached.items() if (mutant.file, mutant.line) in places]
    by_file = [test for test, places in reached.items() if any(file == mutant.file for file, _ in places)]
    found = sorted(by_line or by_file, key=lambda test: len(reached[test]))
    for whole_runs, most in enumerate(MOST):
        yield [test for test in found if ("integration" in test) == bool(whole_runs)][:most]


def copied(folder: Path) -> Path:
    """The repository without what tests do not need."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, folder / name)
    (folder / ".tmp").mkdir()
    return folder


def survives(folder: Path, mutant: Mutant, stages: list[list[str]], limit: int) -> bool:
    path = folder / mutant.file
    original = path.read_text()
    path.write_text(mutant.source)
    try:
        by = next(
            (at for at, tests in enumerate(stages) if tests and not passes(folder, tests, limit)[0]), None
        )
    finally:
        path.write_text(original)
    verdict = "SURVIVES" if by is None else "killed"
    print(f"{verdict:8} {mutant.file}:{mutant.line}: {mutant.before} -> {mutant.after}", flush=True)
    return by is None


def passes(folder: Path, tests: list[str], limit: int | None) -> tuple[bool, float]:
    """Run the tests in a fork of this process, which has imported what takes longest.

    Returns: whether they pass; the CPU seconds of the fork and its children.
    """
    child = os.fork()
    if child == 0:
        _run(folder, tests, limit)
    _, status, used = os.wait4(child, 0)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what the tests left behind
    return status == 0, used.ru_utime + used.ru_stime


def _run(folder: Path, tests: list[str], limit: int | None) -> NoReturn:
    """Never returns: ends the fork with pytest's exit code."""
    code = 1
    try:
        os.setsid()
        os.chdir(folder)
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        os.environ |= {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
        os.environ["PYTEST_XDIST_WORKER"] = "gw0"  # all forks share the runs' warm start
        sys.dont_write_bytecode = True
        sys.path.insert(0, str(folder))
        options = (
            f"--basetemp={folder}/.tmp/gw0",
            "--timeout=300",
            "-Wignore::pytest.PytestAssertRewriteWarning",
        )
        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *options, *tests]))
    finally:
        os._exit(code)


# ---------------------------------------------------------------------- changes


def places(file: Path) -> Iterator[tuple[Path, int, int]]:
    """Of every mutant of a file: the file, the node by its place in `ast.walk`, which of its changes."""
    tree = ast.parse((ROOT / file).read_text())
    unread = {id(node) for part in unread_parts(tree) for node in ast.walk(part)}
    for number, node in enumerate(ast.walk(tree)):
        if id(node) not in unread:
            yield from ((file, number, which) for which, _ in enumerate(changes(node)))


def mutant_at(file: Path, number: int, which: int) -> Mutant:
    tree = ast.parse((ROOT / file).read_text())
    node = next(each for at, each in enumerate(ast.walk(tree)) if at == number)
    line, before, after = list(changes(node))[which](node)
    return Mutant(file, line, before, after, ast.unparse(tree))


def unread_parts(tree: ast.AST) -> Iterator[ast.AST]:
    """Types, which nothing reads when the program runs, and values of unread keywords."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in UNREAD_KEYWORDS[1:]:
            yield node.value
        for field in ("annotation", "returns"):
            if isinstance(part := getattr(node, field, None), ast.AST):
                yield part


Change = Callable[[ast.AST], tuple[int, str, str]]


def changes(node: ast.AST) -> Iterator[Change]:
    """What can be changed about a node; each function changes it and returns line, text before and after."""
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


def _edited(node: ast.AST, edit: Callable[[Any], object], of: str = "") -> tuple[int, str, str]:
    shown = getattr(node, of) if of else node
    before = ast.unparse(shown)
    edit(node)
    return node.lineno, _line(before), _line(ast.unparse(getattr(node, of) if of else node))  # type: ignore[attr-defined]


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


def _left_out(node: ast.AST, at: int) -> tuple[int, str, str]:
    body = node.body  # type: ignore[attr-defined]
    statement, body[at] = body[at], ast.Pass()
    return statement.lineno, _line(ast.unparse(statement)), "pass"


def _line(text: str) -> str:
    return " ".join(text.split())[:90].replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
