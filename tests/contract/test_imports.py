"""Dependencies point one way: the rules of the house, read from the source."""

import ast
import sys
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
LAYERS = (
    "core support",
    "models tasks/base tasks/response tasks/rows",
    "tasks/columns tasks/rewards",
    "tasks/jsonl",
    "tasks/retriever",
    "tasks variants",
    "checkpoints_conv variants/checking __init__",
    "sampling/decoder",
    "data recipe sampling",
    "evaluate plan report",
    "engine/megatron",
    "engine",
    "launch",
    "nemorl",
    "experiments rehearsal",
    "cli",
)
"""Packages and some of their modules, those of nemo_grpo by their own names; what one imports stands in the
lines above its own."""
DEPTHS = {package: depth for depth, layer in enumerate(LAYERS) for package in layer.split()}
UPWARD = {("checkpoints_conv/__main__.py", "cli"): "``python -m checkpoints_conv`` is a command"}


@cache
def import_statements(path):
    """Wherever in a file: under TYPE_CHECKING and in functions, too."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]


def imports(path):
    """Dotted names that a file imports."""
    found = set()
    for node in import_statements(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def file_of(module):
    """Path of one of our modules, from the repository's root; None: it is not ours."""
    base = ROOT / module.replace(".", "/")
    files = (base.with_suffix(".py"), base / "__init__.py")
    return next((file.relative_to(ROOT).as_posix() for file in files if file.is_file()), None)


def imported_files(path):
    """Our files that a file imports by name."""
    modules = set()
    for node in import_statements(path):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            parts = {f"{node.module}.{alias.name}" for alias in node.names}
            modules |= {part if file_of(part) else node.module for part in parts}
    return {file for module in modules if (file := file_of(module))}


def circles(edges):
    """Groups of nodes of which each reaches every other."""

    def reached(start):
        seen = set()
        todo = [start]
        while todo:
            todo += (new := edges.get(todo.pop(), set()) - seen)
            seen |= new
        return seen

    below = {node: reached(node) for node in edges}
    groups = ({other for other in below[node] if node in below.get(other, ())} for node in edges)
    return [set(group) for group in sorted({frozenset(group) for group in groups if group}, key=sorted)]


def sources(folder):
    return sorted((ROOT / folder).rglob("*.py"))


PRODUCT = sources("nemo_grpo") + sources("checkpoints_conv")


def test_core_imports_torch_and_the_standard_library_only():
    for path in sources("nemo_grpo/core"):
        outside = {name.split(".")[0] for name in imports(path)} - set(sys.stdlib_module_names)
        assert outside <= {"torch", "nemo_grpo"}, path


def test_every_package_has_a_layer():
    assert sum(len(layer.split()) for layer in LAYERS) == len(DEPTHS)
    assert set(DEPTHS) == {package_of(path.relative_to(ROOT).as_posix()) for path in PRODUCT}


@pytest.mark.parametrize("package", DEPTHS)
def test_packages_import_from_the_layers_below_only(package):
    files = {path: path.relative_to(ROOT).as_posix() for path in PRODUCT}
    upward = {
        (name, other)
        for path, name in files.items()
        if package_of(name) == package
        for other in {package_of(imported) for imported in imported_files(path)} - {package}
        if DEPTHS[other] >= DEPTHS[package]
    }
    assert upward == {way for way in UPWARD if package_of(way[0]) == package}


def test_no_file_imports_itself_in_a_circle():
    assert circles({path.relative_to(ROOT).as_posix(): imported_files(path) for path in PRODUCT}) == []


def package_of(file):
    """A name in `LAYERS`."""
    parts = Path(file).with_suffix("").parts
    inner = parts[1:] if parts[0] == "nemo_grpo" else parts
    nested = "/".join(inner[:2])
    return nested if nested in DEPTHS else inner[0]


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
