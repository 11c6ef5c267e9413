"""make on a machine whose environment was made for other Pythons."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LEFT_BEHIND = dict.fromkeys(("PYTHONPATH", "PYTHONHOME", "PIP_USER", "PIP_TARGET"), "/modules")


pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def test_environment_of_other_pythons_does_not_reach_the_virtual_environment():
    command = ["make", "--no-print-directory", "--eval", "probe: ; @env", "probe"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | LEFT_BEHIND, capture_output=True, text=True, check=True
    )
    names = {line.partition("=")[0] for line in done.stdout.splitlines()}
    assert "PATH" in names
    assert not names & set(LEFT_BEHIND)


def test_python_in_a_folder_with_a_space_makes_the_virtual_environment(tmp_path):
    python = tmp_path / "my pythons/python"
    python.parent.mkdir()
    python.write_text(f"""#!/bin/sh
case "$*" in *venv*.venv*) echo "$*" >"{tmp_path}/made"; exit 1 ;; esac
""")
    python.chmod(0o755)
    for name in ("Makefile", "pyproject.toml", "requirements", "scripts"):
        (tmp_path / "repository").mkdir(exist_ok=True)
        (tmp_path / "repository" / name).symlink_to(ROOT / name)
    subprocess.run(
        ["make", "venv"],
        cwd=tmp_path / "repository",
        env=os.environ | {"PYTHON": str(python)},
        capture_output=True,
    )
    assert (tmp_path / "made").read_text() == "-m venv .venv\n"
