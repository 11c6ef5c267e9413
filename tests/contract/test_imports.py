"""Dependencies point one way: the rules of the house, read from the source."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENGINES = {"megatron", "transformer_engine", "nemo_rl", "vllm", "ray"}
ALLOWED_ENGINES = {
    "nemo_grpo/engine/megatron": {"megatron", "transformer_engine"},
    "nemo_grpo/engine/generate_vllm.py": {"vllm"},
    "nemo_grpo/nemorl": {"nemo_rl", "ray", "megatron"},
    "nemo_grpo/rehearsal": {"nemo_rl", "ray", "megatron", "vllm"},
}
ALLOWED_OWN = {
    "core": {"core"},
    "variants": {"core", "variants", "errors"},
    "tasks": {"tasks", "errors"},
    "data": {"data", "tasks", "errors"},
    "recipe": {"core", "variants", "recipe", "tasks", "errors"},
    "plan": {"plan", "recipe", "errors"},
    "diagnostics": {"core", "variants", "recipe", "diagnostics", "errors"},
}


def imports(path: Path) -> set[str]:
    """Dotted names that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def test_core_imports_torch_and_the_standard_library_only():
    for path in sources("nemo_grpo/core"):
        outside = {name.split(".")[0] for name in imports(path)} - set(sys.stdlib_module_names)
        assert outside <= {"torch", "nemo_grpo"}, path


@pytest.mark.parametrize("package", ALLOWED_OWN)
def test_packages_import_only_what_lies_below_them(package):
    files = sources(f"nemo_grpo/{package}")
    assert files
    for path in files:
        own = {name.split(".")[1] for name in imports(path) if name.startswith("nemo_grpo.")}
        assert own <= ALLOWED_OWN[package], path


def test_engines_are_imported_in_their_own_modules_only():
    for path in sources("nemo_grpo") + sources("checkpoints_conv"):
        used = {name.split(".")[0] for name in imports(path)} & ENGINES
        name = path.relative_to(ROOT).as_posix()
        allowed = set().union(
            *(engines for where, engines in ALLOWED_ENGINES.items() if name.startswith(where))
        )
        assert used <= allowed, f"{name} imports {used - allowed}"


def test_only_the_command_line_prints():
    for path in sources("nemo_grpo") + sources("checkpoints_conv"):
        if "cli" in path.parts or path.name == "cli.py":
            continue
        calls = [
            node.lineno
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
        ]
        assert not calls, f"{path}: print in lines {calls}"


def test_test_modules_have_names_of_their_own():
    """Ranks of a test import its module by name, from whichever folder comes first."""
    names = [
        path.name
        for path in (ROOT / "tests").rglob("*.py")
        if path.name not in ("__init__.py", "conftest.py")
    ]
    assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)
