"""Dependencies point one way: the rules of the house, read from the source."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENGINES = {"megatron", "transformer_engine", "nemo_rl", "vllm", "ray"}
ALLOWED_ENGINES = {
    "nemo_grpo/engine/megatron": {"megatron", "transformer_engine"},
    "nemo_grpo/sampling/generate_vllm.py": {"vllm"},
    "nemo_grpo/nemorl": {"nemo_rl", "ray", "megatron"},
    "nemo_grpo/rehearsal": {"nemo_rl", "ray", "megatron", "vllm"},
}
ALLOWED_OWN = {
    "sampling": {"core", "tasks", "sampling", "hf_folder", "progress", "errors"},
    "evaluate": {
        *("core", "tasks", "data", "recipe", "sampling", "evaluate", "progress", "errors", "files"),
        "hf_folder",
        "pictures",
    },
    "core": {"core"},
    "variants": {"core", "variants", "aliases", "errors", "extensions"},
    "tasks": {"tasks", "errors", "extensions"},
    "data": {"data", "tasks", "errors", "files"},
    "recipe": {"core", "variants", "recipe", "tasks", "aliases", "dotted", "errors", "extensions", "shipped"},
    "plan": {"plan", "recipe", "variants", "dotted", "errors", "pictures"},
    "diagnostics": {"core", "variants", "recipe", "diagnostics", "dotted", "errors", "pictures"},
}


@cache
def import_statements(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """Wherever in a file: under TYPE_CHECKING and in functions, too."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]


def imports(path: Path) -> set[str]:
    """Dotted names that a file imports."""
    found: set[str] = set()
    for node in import_statements(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def file_of(module: str) -> str | None:
    """Path of one of our modules, from the repository's root; None: it is not ours."""
    base = ROOT / module.replace(".", "/")
    files = (base.with_suffix(".py"), base / "__init__.py")
    return next((file.relative_to(ROOT).as_posix() for file in files if file.is_file()), None)


def imported_files(path: Path) -> set[str]:
    """Our files that a file imports by name."""
    modules: set[str] = set()
    for node in import_statements(path):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            parts = {f"{node.module}.{alias.name}" for alias in node.names}
            modules |= {part if file_of(part) else node.module for part in parts}
    return {file for module in modules if (file := file_of(module))}


def circles(edges: Mapping[str, set[str]]) -> list[set[str]]:
    """Groups of nodes of which each reaches every other."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            todo += (new := edges.get(todo.pop(), set()) - seen)
            seen |= new
        return seen

    below = {node: reached(node) for node in edges}
    groups = ({other for other in below[node] if node in below.get(other, ())} for node in edges)
    return [set(group) for group in sorted({frozenset(group) for group in groups if group}, key=sorted)]


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


PRODUCT = sources("nemo_grpo") + sources("checkpoints_conv")


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


def test_no_file_and_no_package_imports_itself_in_a_circle():
    files = {
        path.relative_to(ROOT).as_posix(): imported_files(path)
        for path in PRODUCT
        if path.name != "__main__.py"  # a command, which nothing imports
    }
    packages: dict[str, set[str]] = defaultdict(set)
    for file, below in files.items():
        packages[package_of(file)] |= {package_of(other) for other in below} - {package_of(file)}
    assert circles(files) == []
    assert circles(packages) == []


def test_circles_are_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"e"}}) == [{"b", "c"}, {"e"}]
    assert "nemo_grpo/recipe/recipe.py" in imported_files(ROOT / "nemo_grpo/recipe/rules.py")


def package_of(file: str) -> str:
    """``checkpoints_conv``, ``nemo_grpo/recipe``, or a module directly in nemo_grpo."""
    parts = file.split("/")
    return parts[0] if parts[0] == "checkpoints_conv" else "/".join(parts[:2])


def test_engines_are_imported_in_their_own_modules_only():
    for path in PRODUCT:
        used = {name.split(".")[0] for name in imports(path)} & ENGINES
        name = path.relative_to(ROOT).as_posix()
        allowed = set().union(
            *(engines for where, engines in ALLOWED_ENGINES.items() if name.startswith(where))
        )
        assert used <= allowed, f"{name} imports {used - allowed}"


def test_only_the_command_line_prints():
    for path in PRODUCT:
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
    names = [path.name for path in sources("tests") if path.name not in ("__init__.py", "conftest.py")]
    assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)
