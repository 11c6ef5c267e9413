"""Installed from a wheel, far from any clone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("nemo_grpo", "checkpoints_conv", "recipes", "slurm")
QUICK = ["grpo.max_num_steps=1", "nemo_grpo.warm_start.num_steps=2", "grpo.val_at_start=false"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A copy of what a wheel is built from."""
    sources = tmp_path_factory.mktemp("sources")
    for part in PARTS:
        shutil.copytree(ROOT / part, sources / part, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, sources)
    return sources


@pytest.fixture(scope="module")
def wheel(sources, tmp_path_factory):
    """Built by the backend that pip runs."""
    built = tmp_path_factory.mktemp("built")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    done = subprocess.run([*command, "-w", built, sources], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A folder as pip installs the wheel; the dependencies come from this environment."""
    target = tmp_path_factory.mktemp("installed") / "site-packages"
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--target", target, wheel]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return target


def run(installed, folder, *arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "nemo_grpo.cli", *arguments],
        cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip


pytestmark = pytest.mark.slow


def test_the_wheel_holds_every_recipe_and_job_script(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("recipes", "slurm"):
        files = [path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*") if path.is_file()]
        assert {f"nemo_grpo/{file}" for file in files if "__pycache__" not in file} <= names


def test_a_wheel_can_be_built_from_the_source_archive(sources, tmp_path):
    code = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, tmp_path], cwd=sources, capture_output=True, check=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert {"setup.py", "recipes/quickstart.yaml", "recipes/base/cluster.yaml", "slurm/lib/job.sh"} <= names


def test_quickstart_trains_in_an_empty_folder(installed, tmp_path):
    done = run(installed, tmp_path, "train", "quickstart", *QUICK)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "runs/quickstart/hf/model.safetensors").is_file()
    where = run(installed, tmp_path, "recipe", "list", "quickstart")
    assert "quickstart-gpg: gpg" in where.stdout


def test_job_scripts_are_written_with_the_sources_that_they_use(installed, tmp_path):
    refused = run(installed, tmp_path, "launch", "quickstart", "--dry-run")
    assert refused.returncode == 2
    assert "`nemo-grpo slurm scripts DIR`" in refused.stderr
    assert run(installed, tmp_path, "slurm", "scripts", "jobs").returncode == 0
    jobs = tmp_path / "jobs"
    launched = run(installed, tmp_path, "launch", "quickstart", "--dry-run", NEMO_GRPO_ROOT=str(jobs))
    assert f"{jobs}/slurm/embedded.sbatch" in launched.stdout
    facts = [sys.executable, str(jobs / "nemo_grpo/launch/node_facts.py"), str(tmp_path / "facts")]
    assert (jobs / "slurm/lib/ray_ready.py").is_file()
    assert os.access(jobs / "slurm/pipeline.sh", os.X_OK)
    (tmp_path / "facts").mkdir()
    assert subprocess.run(facts, check=False).returncode == 0
    again = run(installed, tmp_path, "slurm", "scripts", "jobs")
    assert again.returncode == 2
    assert "jobs exists; name a new folder" in again.stderr
