"""Installed from a wheel, far from any clone."""

from __future__ import annotations

import os
import shutil
import tarfile
import zipfile

import pytest
from processes import ROOT, nemo_grpo, output_of, python

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
    options = ("--no-deps", "--no-build-isolation", "--quiet")
    output_of(python("-m", "pip", "wheel", *options, "-w", built, sources))
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A folder as pip installs the wheel; the dependencies come from this environment."""
    target = tmp_path_factory.mktemp("installed") / "site-packages"
    output_of(python("-m", "pip", "install", "--no-deps", "--quiet", "--target", target, wheel))
    return target


def run(installed, folder, *arguments, exit_code=0, **environment):
    process = nemo_grpo(*arguments, cwd=folder, PYTHONPATH=str(installed), **environment)
    return output_of(process, exit_code)


pytestmark = pytest.mark.slow


def test_the_wheel_holds_every_recipe_and_job_script(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("recipes", "slurm"):
        files = [path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*") if path.is_file()]
        assert {f"nemo_grpo/{file}" for file in files if "__pycache__" not in file} <= names


def test_a_wheel_can_be_built_from_the_source_archive(sources, tmp_path):
    code = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
    output_of(python("-c", code, tmp_path, cwd=sources))
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert {"setup.py", "recipes/quickstart.yaml", "recipes/base/cluster.yaml", "slurm/lib/job.sh"} <= names


def test_quickstart_trains_in_an_empty_folder(installed, tmp_path):
    run(installed, tmp_path, "train", "quickstart", *QUICK)
    assert (tmp_path / "runs/quickstart/hf/model.safetensors").is_file()
    assert "quickstart-gpg: gpg" in run(installed, tmp_path, "recipe", "list", "quickstart")


def test_job_scripts_are_written_with_the_sources_that_they_use(installed, tmp_path):
    launch = ("launch", "quickstart", "--dry-run")
    assert "`nemo-grpo slurm scripts DIR`" in run(installed, tmp_path, *launch, exit_code=2)
    run(installed, tmp_path, "slurm", "scripts", "jobs")
    jobs = tmp_path / "jobs"
    launched = run(installed, tmp_path, *launch, NEMO_GRPO_ROOT=str(jobs))
    assert f"{jobs}/slurm/embedded.sbatch" in launched
    assert (jobs / "slurm/lib/ray_ready.py").is_file()
    assert os.access(jobs / "slurm/pipeline.sh", os.X_OK)
    (tmp_path / "facts").mkdir()
    output_of(python(jobs / "nemo_grpo/launch/node_facts.py", tmp_path / "facts"))
    again = run(installed, tmp_path, "slurm", "scripts", "jobs", exit_code=2)
    assert "jobs exists; name a new folder" in again
