"""Dependencies point one way, and loading a recipe imports nothing heavy: the rules of the house."""

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
ENGINES = {"megatron", "transformer_engine", "nemo_rl", "vllm", "ray"}
ALLOWED_ENGINES = {
    "nemo_grpo/engine/megatron": {"megatron", "transformer_engine"},
    "nemo_grpo/sampling/generate_vllm.py": {"vllm"},
    "nemo_grpo/nemorl": {"nemo_rl", "ray", "megatron"},
    "nemo_grpo/rehearsal": {"nemo_rl", "ray", "megatron", "vllm"},
}
LAYERS = (
    "core support tasks/response",
    "models tasks/base",
    "tasks/rows tasks/rewards",
    "tasks/jsonl",
    "tasks/retriever",
    "tasks variants",
    "checkpoints_conv variants/checking __init__",
    "sampling/decoder",
    "data recipe sampling",
    "evaluate plan report",
    "run",
    "engine/megatron launch",
    "engine nemorl",
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
    """Names that a file imports, as far as their first dot."""
    found = set()
    for node in import_statements(path):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        found |= {name.split(".")[0] for name in names} - {""}
    return found


def file_of(module):
    """Path of one of our modules, from the repository's root; None: it is not ours."""
    base = ROOT / module.replace(".", "/")
    files = (base.with_suffix(".py"), base / "__init__.py")
    return next((file.relative_to(ROOT).as_posix() for file in files if file.is_file()), None)


def imported_files(path):
    modules = set()
    for node in import_statements(path):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            parts = {f"{node.module}.{alias.name}" for alias in node.names}
            modules |= {part if file_of(part) else node.module for part in parts}
    return {file for module in modules if (file := file_of(module))}


def sources(folder):
    return sorted((ROOT / folder).rglob("*.py"))


PRODUCT = sources("nemo_grpo") + sources("checkpoints_conv")


def test_core_imports_torch_and_the_standard_library_only():
    for path in sources("nemo_grpo/core"):
        outside = imports(path) - set(sys.stdlib_module_names)
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


def test_only_commands_experiments_and_rehearsals_import_the_engine():
    importers = {
        package_of(path.relative_to(ROOT).as_posix())
        for path in PRODUCT
        if any(package_of(file).startswith("engine") for file in imported_files(path))
    }
    assert importers == {"engine", "engine/megatron", "cli", "experiments", "rehearsal"}


def test_no_file_imports_itself_in_a_circle():
    TopologicalSorter({path.relative_to(ROOT).as_posix(): imported_files(path) for path in PRODUCT}).prepare()


def package_of(file):
    """A name in `LAYERS`."""
    parts = Path(file).with_suffix("").parts
    inner = parts[1:] if parts[0] == "nemo_grpo" else parts
    nested = "/".join(inner[:2])
    return nested if nested in DEPTHS else inner[0]


def test_engines_are_imported_in_their_own_modules_only():
    for path in PRODUCT:
        used = imports(path) & ENGINES
        name = path.relative_to(ROOT).as_posix()
        allowed = set().union(
            *(engines for where, engines in ALLOWED_ENGINES.items() if name.startswith(where))
        )
        assert used <= allowed, f"{name} imports {used - allowed}"


def test_test_modules_have_names_of_their_own():
    """Ranks of a test import its module by name, from whichever folder comes first."""
    names = [path.name for path in sources("tests") if path.name not in ("__init__.py", "conftest.py")]
    assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)


HEAVY = ("torch", "transformers", "megatron", "numpy")

STATEMENTS = """
import nemo_grpo.cli, nemo_grpo.variants
import nemo_grpo.nemorl.doctor
from nemo_grpo.recipe import load_recipe; load_recipe('recipes/quickstart-erpo.yaml')
from nemo_grpo.cli import plan; plan.plan(['recipes/erpo', 'nemo_grpo.run_name=x'])
"""


def test_recipes_load_and_are_planned_without_heavy_libraries():
    assert loaded_by(STATEMENTS, HEAVY) == "[]"


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU megatron-core's fused functions are compiled")
def test_the_engine_loads_without_torchs_compiler():
    assert loaded_by("import nemo_grpo.engine.megatron", ("torch._dynamo", "torch._inductor")) == "[]"


def test_nemo_rls_workers_load_without_griffe():
    assert loaded_by("import nemo_grpo.nemorl.compat", ("griffe",)) == "[]"


def loaded_by(statement, names):
    code = f"{statement}\nimport sys; print([name for name in {names} if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return result.stdout.splitlines()[-1]
