"""Installed from a wheel, on Slurm: a shipped recipe by its name, and a comparison as a job."""

import json
import shlex
import sys

import pytest
from jobs import Job
from wheels import build_wheel, copy_sources, install

MINUTE = 60
QUICK = ("grpo.max_num_steps=1", "nemo_grpo.warm_start.num_steps=2", "grpo.val_period=1")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder of packages whose copies say that they, and not this clone, are used."""
    folder = tmp_path_factory.mktemp("wheel")
    (folder / "sources").mkdir()
    wheel = build_wheel(copy_sources(folder / "sources"), folder)
    return says(install(wheel, folder / "site-packages"), "the wheel's sources")


def says(folder, sentence):
    with (folder / "nemo_grpo/cli/__init__.py").open("a") as file:
        file.write(f"print({sentence!r}, file=sys.stderr)\n")
    return folder


def test_a_wheel_launches_a_shipped_recipe_by_its_name_and_compares(slurm, installed, tmp_path):
    jobs = tmp_path / "jobs"
    environment = {"PYTHONPATH": str(installed), "NEMO_GRPO_ROOT": str(jobs), "OMP_NUM_THREADS": "1"}

    def run(*command):
        return slurm.run(*map(str, command), cwd=tmp_path, **environment).stdout

    run(sys.executable, "-m", "nemo_grpo.cli", "slurm", "scripts", "jobs")
    says(jobs, "the folder's sources")
    said = run(sys.executable, "-m", "nemo_grpo.cli", "launch", "quickstart", "--time", "10", *QUICK)
    launched = Job(slurm, tmp_path, said.split()[1], "quickstart")
    assert launched.wait(3 * MINUTE) == "COMPLETED", launched.output
    assert "the folder's sources" in (launched.logs / "attempt-0/driver.log").read_text()
    assert (tmp_path / "runs/quickstart/hf/model.safetensors").is_file()

    command = (sys.executable, "-m", "nemo_grpo.cli", "compare", "quickstart", "--variants", "grpo,gpg")
    wrapped = shlex.join([*command, "--seeds", "1", *QUICK])
    number = run("sbatch", "--parsable", "--time=10", f"--wrap={wrapped}").strip()
    compared = Job(slurm, tmp_path, number, "wrap")
    assert compared.wait(5 * MINUTE) == "COMPLETED", compared.output
    assert "the wheel's sources" in compared.output
    results = json.loads((tmp_path / "runs/compare-quickstart/results.json").read_text())
    assert [setting["setting"] for setting in results["settings"]] == ["grpo", "gpg"]
    assert list(results["paired"]["settings"]) == ["gpg"]
    assert results["missing"] == {}
