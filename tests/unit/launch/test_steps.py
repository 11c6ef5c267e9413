"""slurm/lib/job.sh: the srun command of a step. Slurm's programs are stubs."""

from unit.launch.shell import ROOT, bash

SCRIPT = """
scontrol() {{ echo n1; }}
srun() {{ printf '%s\\n' "$@"; }}
ROOT=/repo SLURM_JOB_ID=7 SLURM_JOB_NODELIST=n1 SLURM_CPUS_ON_NODE=96 JOB_LOGS=/logs {variables}
source {root}/slurm/lib/job.sh
step nemo-grpo --nodes=2 -- "$PYTHON" -m x "a b"
"""


def srun(folder, variables=""):
    return bash(SCRIPT.format(root=ROOT, variables=variables), cwd=folder).stdout.splitlines()


def test_step_shares_the_nodes_and_passes_words_unbroken(tmp_path):
    arguments = srun(tmp_path, "PYTHON=/env/python")
    options = "--overlap --kill-on-bad-exit=1 --cpus-per-task=96 --nodes=2"
    assert arguments == [*options.split(), "/env/python", "-m", "x", "a b"]


def test_step_in_a_container_sees_repository_submission_folder_logs_and_mounts(tmp_path):
    arguments = srun(tmp_path, "CONTAINER=nemo.sqsh MOUNTS=/data:/data")
    assert "--container-image=nemo.sqsh" in arguments
    assert "--container-name=nemo-grpo" in arguments
    assert f"--container-mounts=/repo:/repo,{tmp_path}:{tmp_path},/logs:/logs,/data:/data" in arguments
    assert f"--container-workdir={tmp_path}" in arguments
    assert arguments[-4:] == ["python", "-m", "x", "a b"]


def test_step_asks_for_cpus_that_every_node_has(tmp_path):
    assert "--cpus-per-task=48" in srun(tmp_path, "SLURM_JOB_CPUS_PER_NODE='64(x2),48'")
    assert "--cpus-per-task=64" in srun(tmp_path, "SLURM_JOB_CPUS_PER_NODE='64(x3)'")


def test_step_has_the_jobs_variables_also_under_export_none(tmp_path):
    variables = """PYTHON=python SLURM_EXPORT_ENV=NONE
        srun() { echo "$SLURM_EXPORT_ENV"; }"""
    assert srun(tmp_path, variables) == ["ALL"]
