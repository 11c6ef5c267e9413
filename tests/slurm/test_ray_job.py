"""slurm/train.sbatch on a real Slurm of several nodes, with a real Ray and a stand-in driver."""

import importlib.util
import signal
import sys

import pytest
from cluster import ROOT
from jobs import preempt, submit

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed: make test-slurm installs it"
)

QUICKSTART = ROOT / "recipes/quickstart.yaml"
STAND_IN = ROOT / "tests/slurm/stand_in.py"
GPUS_PER_NODE = 2
LAYOUT = (
    "cluster.num_nodes=2",
    f"cluster.gpus_per_node={GPUS_PER_NODE}",
    "policy.train_micro_batch_size=8",
)
MINUTE = 60


@pytest.fixture
def start(slurm, tmp_path):
    """Submit a two-node job of the stand-in driver; of an ended job no process is left."""
    if not slurm.has_namespaces:
        pytest.skip("namespaces are not allowed here, and two nodes of Ray need two addresses")
    started = []

    def submit_job(*options, **environment):
        environment = {
            "DRIVER": f"{sys.executable} {STAND_IN}",
            "FOLDER": str(tmp_path / "checkpoints"),
            "PYTHON": sys.executable,
            "RAY_CPUS": "1",
            "RAY_OBJECT_STORE_BYTES": "100000000",
            "OMP_NUM_THREADS": "1",
        } | environment
        line = [
            "--nodes=2",
            f"--gpus-per-node={GPUS_PER_NODE}",
            "--time=20",
            "--signal=B:USR1@60",
            *options,
            str(QUICKSTART),
            *LAYOUT,
        ]
        line.append(f"checkpointing.checkpoint_dir={tmp_path}/checkpoints")
        job = submit(slurm, tmp_path, *line, **environment)
        started.append(job)
        return job

    yield submit_job
    for job in started:
        job.cancel()
        job.wait(MINUTE)
    assert left_over(slurm) == []


def begun(job):
    job.wait_for_output("start from step 0", 2 * MINUTE)
    return job


def assert_saved_and_resumed(job, cause):
    """Once it is told to stop, by ``cause``: two attempts, the second from where the first saved."""
    job.wait_for_output("saved step", MINUTE)
    saved = int(job.output.split("saved step ")[1].split()[0])
    assert job.wait(3 * MINUTE) == "COMPLETED"
    assert 0 < saved < 40
    assert f"start from step {saved}" in job.output
    attempts = [row[2:4] + row[6:] for row in job.attempts()]
    assert attempts == [[cause, "75", "retry"], ["finished", "0", "stop"]]


def hesitant_python(folder, hesitation):
    """A Python whose start a line of shell may delay or prevent."""
    script = folder / "python"
    script.write_text(f'#!/bin/bash\n{hesitation}\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return str(script)


def left_over(slurm):
    """Processes of Ray and drivers on all nodes."""
    listed = (slurm.run("ps", "-eo", "args", node=node).stdout.splitlines() for node in slurm.nodes)
    return [line for lines in listed for line in lines if "raylet" in line or STAND_IN.name in line]


def test_preempted_job_saves_before_its_ray_ends_and_resumes(slurm, start, tmp_path):
    job = begun(start("--nodelist=n1,n2", STEPS="40", PACE="0.5"))
    urgent = preempt(slurm, tmp_path, "n2")
    assert urgent.wait(2 * MINUTE) == "COMPLETED"
    assert_saved_and_resumed(job, "preempted")


def test_signal_before_the_time_limit_saves_requeues_and_resumes_on_both_nodes(start):
    job = begun(start(STEPS="40", PACE="0.5"))
    job.signal(signal.SIGUSR1)
    assert_saved_and_resumed(job, "time limit")
    assert job.output.count("workers [('n1', 2), ('n2', 2)]") == 2
    assert "all-reduce  4 ranks on n1, n2, gloo" in job.output
    latest = job.logs.parent / "latest"
    assert latest.resolve() == job.logs / "attempt-1"
    assert "finished step 40" in (latest / "driver.log").read_text()
    for name in ("preflight", "ray-head", "ray-worker-n2", "ray-ready"):
        assert (latest / f"{name}.log").exists()


def test_failing_driver_ends_the_job_with_its_exit_code_and_is_not_repeated(start):
    job = start(FAIL_AT="2")
    job.wait_for_output("the driver breaks", 2 * MINUTE)
    job.wait(MINUTE)
    assert (job.state, job.exit_code) == ("FAILED", 3)
    assert "the driver failed before its first checkpoint" in job.output
    assert (job.logs / "attempt-0/ray-session/n2/raylet.out").exists()


@pytest.mark.parametrize(
    ("node", "program", "part", "code"),
    [("n2", "raylet", "ray-worker", 71), ("n1", "gcs_server", "ray-head", 70)],
)
def test_lost_part_ends_the_job_within_a_minute_with_its_last_lines(slurm, start, node, program, part, code):
    job = begun(start(STEPS="1000", PACE="0.5", MAX_RETRIES="0"))
    slurm.kill(node, program)
    job.wait(MINUTE)
    assert (job.state, job.exit_code) == ("FAILED", code)
    assert f"{part} ended" in job.output
    assert f"{part}" in job.output.split("the end of ")[1]


def test_missing_worker_is_named_with_the_end_of_its_log(start, tmp_path):
    waits = "if [[ $SLURMD_NODENAME = n2 && $* = *ray.scripts* ]]; then echo 'waits for ever'; sleep 1000; fi"
    job = start(PYTHON=hesitant_python(tmp_path, waits), RAY_SECONDS="10", MAX_RETRIES="0")
    job.wait(2 * MINUTE)
    assert (job.state, job.exit_code) == ("FAILED", 72)
    assert "n2: not registered after" in job.output
    assert "waits for ever" in job.output.split("missing: n2")[1]


def test_ray_that_does_not_start_at_once_is_started_again(start, tmp_path):
    failed = f"{tmp_path}/failed-$SLURMD_NODENAME"
    fails_once = f"if [[ $* = *ray.scripts* && ! -e {failed} ]]; then touch {failed}; exit 1; fi"
    job = start(PYTHON=hesitant_python(tmp_path, fails_once))
    assert job.wait(3 * MINUTE) == "COMPLETED"
    assert sorted(path.name for path in tmp_path.glob("failed-*")) == ["failed-n1", "failed-n2"]
    assert job.field("Restarts") == "0"
    for name in ("ray-head", "ray-worker-n2"):
        assert "in try 1 of 3" in (job.logs / f"attempt-0/{name}.log").read_text()


def test_another_one_asks_when_the_head_ends_after_it_has_listened(start, tmp_path):
    """As Ray's does on a busy machine whose agents are late; the worker waits, so somebody is asking."""
    ended, asked = f"{tmp_path}/ended", f"{tmp_path}/logs/*/*/attempt-0/ray-ready.log"
    ends = f"""
if [[ $* = *ray.scripts*--head* && ! -e {ended} ]]; then
    {sys.executable} "$@" &
    until compgen -G "{asked}" >/dev/null; do sleep 0.1; done
    sleep 6
    kill $!
    wait
    touch {ended}
    exit 1
fi
while [[ $* = *ray.scripts* && ! -e {ended} ]]; do sleep 0.1; done"""
    job = start(PYTHON=hesitant_python(tmp_path, ends))
    assert job.wait(3 * MINUTE) == "COMPLETED"
    assert job.field("Restarts") == "0"
    assert "in try 1 of 3" in (job.logs / "attempt-0/ray-head.log").read_text()


def test_running_job_rejects_other_clients_and_a_cancelled_job_is_not_requeued(slurm, start):
    job = begun(start(STEPS="1000", PACE="0.5"))
    address = job.output.split("Ray head on ")[1].split()[0]
    joins = f"import ray; ray.init(address='{address}'); print('inside', ray.nodes())"
    stranger = slurm.run(sys.executable, "-c", joins, node="n1", check=False)
    assert "Failed to connect" in stranger.stderr
    assert "inside" not in stranger.stdout
    job.cancel()
    assert job.wait(MINUTE) == "CANCELLED"
    assert job.field("Restarts") == "0"


def test_job_moves_to_another_node_when_slurmd_dies(slurm, start):
    job = begun(start(STEPS="60", PACE="0.5"))
    assert job.field("NodeList") == "n[1-2]"
    job.wait_for(lambda: list((job.folder / "checkpoints").glob("step_*")), MINUTE, "a checkpoint")
    slurm.kill("n2", "slurmd")
    try:
        job.wait_for(lambda: job.field("Restarts") == "1", 2 * MINUTE, "a requeue")
        assert job.wait(3 * MINUTE) == "COMPLETED"
        assert job.field("NodeList") == "n[1,3]"
        assert "workers [('n1', 2), ('n3', 2)]" in job.output
        assert "start from step 0" not in job.output.split("workers [('n1', 2), ('n3', 2)]")[1]
    finally:
        slurm.power_off("n2")
        slurm.boot("n2")


def test_folder_that_nodes_do_not_share_is_refused_before_ray_starts(start):
    job = start(LOGS="/tmp/not-shared")
    job.wait(MINUTE)
    assert (job.state, job.exit_code) == ("FAILED", 69)
    assert "refused  shared folder  n2 did not write" in job.output
    assert "Ray head" not in job.output
