"""The import hooks: they act in a rehearsal alone, and replace what they say."""

import ast
import importlib
import os
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest
from pydantic import PydanticUserError, TypeAdapter

from nemo_grpo.rehearsal import SWITCH

PACKAGE = Path(importlib.import_module("nemo_grpo.rehearsal").__file__ or "").parent
SITE = PACKAGE / "site"
ROOT = PACKAGE.parents[1]


def python(code, *paths, switch="test"):
    environment = {name: value for name, value in os.environ.items() if name != SWITCH}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (SITE, ROOT, *paths)))
    if switch is not None:
        environment[SWITCH] = switch
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_nothing_is_hooked_without_the_switch():
    code = "import sys; print('rehearsal_hooks' in sys.modules)"
    assert python(code, switch=None) == "False"
    assert python(code) == "True"


def test_a_module_is_replaced_once_it_has_been_imported(tmp_path):
    package = tmp_path / "nemo_rl" / "utils"
    package.mkdir(parents=True)
    (package / "nvml.py").write_text("def get_device_uuid(index): return 'asked the driver'\n")
    code = (
        "import sys, types; ray = sys.modules['ray'] = types.ModuleType('ray')\n"
        "ray.get_gpu_ids = lambda: [3]\n"
        "from nemo_rl.utils import nvml; print(nvml.get_device_uuid(0))"
    )
    assert python(code, tmp_path, switch=None) == "asked the driver"
    assert python(code, tmp_path, switch="7").startswith("GPU-7-")


def test_packages_of_a_gpu_host_are_there_for_bridge_alone(tmp_path):
    (tmp_path / "megatron" / "bridge").mkdir(parents=True)
    (tmp_path / "megatron" / "bridge" / "uses.py").write_text("import modelopt.torch as found\n")
    asked = "try:\n    import modelopt\n    print('found')\nexcept ModuleNotFoundError:\n    print('absent')"
    assert python(asked, tmp_path) == "absent"
    found = python("from megatron.bridge import uses; print(uses.found.Anything.deeper)", tmp_path)
    assert found.startswith("<class")


@pytest.mark.parametrize("name", ["cuda", "megatron", "nemo_rl", "vllm"])
def test_every_replacement_exists(name):
    hooks = python("import rehearsal_hooks; print(*rehearsal_hooks.AFTER_IMPORT.values())").split()
    named = {hook.partition(":")[2] for hook in hooks if hook.startswith(f"{name}:")}
    source = (PACKAGE / f"{name}.py").read_text()
    assert named
    assert all(f"def {function}(" in source for function in named)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="pydantic takes them from Python 3.12 on")
def test_pydantic_refuses_typings_dictionaries_below_3_12():
    with pytest.raises(PydanticUserError, match=r"Please use `typing_extensions.TypedDict`"):
        TypeAdapter(typing.TypedDict("Settings", {"a": int}))


PATCHES = [PACKAGE / f"{name}.py" for name in ("megatron", "nemo_rl", "vision", "vllm")]
PATCHES.append(SITE / "rehearsal_hooks.py")


@pytest.mark.parametrize("file", PATCHES, ids=lambda file: file.stem)
def test_the_test_that_shows_a_fault_exists(file):
    tests = re.findall(r"Needed while: (\S+)::(\w+)", file.read_text())
    assert tests
    for path, name in tests:
        assert f"def {name}(" in (ROOT / path).read_text()


@pytest.mark.parametrize("file", PATCHES, ids=lambda file: file.stem)
def test_a_patch_that_names_a_fault_names_upstream_and_versions(file):
    docstrings = [
        ast.get_docstring(node) or ""
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef)
    ]
    for docstring in docstrings:
        if "Needed while: " in docstring:
            assert "Upstream: " in docstring
            assert "Versions: " in docstring
