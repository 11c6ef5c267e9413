"""Every workaround in nemorl says where the fault is reported, who has it, and which test shows it."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "nemo_grpo" / "nemorl" / "workarounds").glob("[a-z]*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_workaround_names_upstream_versions_and_the_test_that_shows_the_fault(file):
    docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
    lines = dict(line.split(": ", 1) for line in docstring.splitlines() if ": " in line)
    assert lines["Upstream"]
    assert lines["Versions"]
    path, name = lines["Needed while"].split("::")
    assert f"def {name}(" in (ROOT / path).read_text()
