"""Jobs run, failed, stopped and continued; stand-ins for training runs keep it fast."""

import base64
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
from processes import ROOT, wait_for

from nemo_grpo.cli.compare import show_results
from nemo_grpo.experiments.jobs import Status, make_jobs
from nemo_grpo.experiments.results import finished_groups, is_complete, write_results
from nemo_grpo.experiments.runner import check_unchanged, run_experiment, run_jobs
from nemo_grpo.experiments.sweep import sweep_variants, with_overrides
from nemo_grpo.run.continuation import keep_inputs, model_files
from nemo_grpo.support.errors import UserError, how_ended

pytestmark = pytest.mark.usefixtures("undrawn")
QUICKSTART = ROOT / "recipes" / "quickstart.yaml"


def settings_of(variants, overrides=()):
    sweep = sweep_variants(QUICKSTART, variants, [0])
    return with_overrides(sweep.settings, ["grpo.max_num_steps=3", *overrides])


# Makes steps one by one from where it stands; SIGINT ends it with exit code 75, a file fail-NAME breaks it.
RUN = """
import json, signal, sys, time
from pathlib import Path
folder, recipe, seconds = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
folder.mkdir(parents=True, exist_ok=True)
signal.signal(signal.SIGINT, lambda *_: sys.exit(75))
with (folder / "starts").open("a") as file:
    file.write("x")
(folder / "recipe.resolved.yaml").write_text(recipe.read_text())
metrics = folder / "metrics.jsonl"
done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
for step in range(done, 4):
    with metrics.open("a") as file:
        file.write(json.dumps({"step": step, "validation/accuracy": step / 10}) + "\\n")
    time.sleep(seconds)
    if (folder.parent / f"fail-{folder.name}").exists():
        print("error: it broke")
        sys.exit(2)
"""


@pytest.fixture
def jobs(tmp_path):
    return make_jobs(settings_of(["grpo", "gpg"]), [0, 1], tmp_path / "out")


def command_of(folder, seconds, job):
    resolved = folder / f"{job.name}.yaml"
    asked = job.recipe.policy.precision
    resolved.write_text(job.recipe.with_precision(asked.replace("auto", "bfloat16")).to_yaml())
    return [sys.executable, str(folder / "run.py"), str(job.folder), str(resolved), str(seconds)]


@pytest.fixture
def command(tmp_path):
    (tmp_path / "run.py").write_text(RUN)
    return lambda seconds: partial(command_of, tmp_path, seconds)


def starts(jobs):
    files = [job.folder / "starts" for job in jobs]
    return [len(file.read_text()) if file.exists() else 0 for file in files]


def test_complete_runs_are_not_run_again(tmp_path, jobs, command):
    out = tmp_path / "out"
    assert {s.state for s in run_jobs(jobs[:3], out, 2, command(0)).values()} == {"finished"}
    ended = run_jobs(jobs, out, 2, command(0))
    assert starts(jobs) == [1, 1, 1, 1]
    assert list(ended) == [job.name for job in jobs]
    assert {status.state for status in ended.values()} == {"finished"}
    metrics = jobs[1].folder / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:2]))
    run_jobs(jobs, out, 2, command(0))
    assert starts(jobs) == [1, 2, 1, 1]
    assert is_complete(jobs[1])


def test_a_run_that_reached_its_goal_is_complete(tmp_path):
    goal = ["++grpo.stop_at_validation_metric=val:accuracy", "++grpo.stop_at_validation_threshold=0.7"]
    (job,) = make_jobs(settings_of(["grpo"], goal), [0], tmp_path / "out")
    job.folder.mkdir(parents=True)
    for accuracy, complete in ((0.6, False), (0.8, True)):
        row = {"step": 1, "validation/accuracy": accuracy}
        (job.folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        assert is_complete(job) == complete


def test_a_finished_run_that_chose_its_precision_is_not_run_again(tmp_path, command):
    out = tmp_path / "out"
    jobs = make_jobs(settings_of(["grpo"], ["policy.precision=auto"]), [0], out)
    for _ in range(2):
        run_jobs(jobs, out, 1, command(0))
        check_unchanged(jobs)
    assert starts(jobs) == [1]
    with pytest.raises(UserError, match=r"precision: bfloat16 -> float32; undo that, or choose another"):
        check_unchanged(make_jobs(settings_of(["grpo"]), [0], out))


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (["policy.generation.val_temperature=5"], r"generation\.val_temperature: 1\.0 -> 5\.0; undo"),
        (["grpo.max_num_steps=999"], r"grpo\.max_num_steps: 3 -> 999"),
        (["logger.tensorboard_enabled=false", "policy.train_micro_batch_size=8"], None),
    ],
)
def test_a_mean_is_of_runs_that_trained_and_validated_alike(tmp_path, command, now, said):
    out = tmp_path / "out"

    def jobs(overrides):
        return make_jobs(settings_of(["grpo"], overrides), [0], out)

    run_jobs(jobs([]), out, 1, command(0))
    before = (out / "runs/grpo-s0/recipe.resolved.yaml").read_text()
    if said:
        with pytest.raises(UserError, match=said):
            run_experiment(jobs(now), out, num_parallel=1, command="x")
        assert (out / "runs/grpo-s0/recipe.resolved.yaml").read_text() == before
        return
    check_unchanged(jobs(now))
    run_jobs(jobs(now), out, 1, command(0))
    assert starts(jobs(now)) == [1]


def test_seeds_that_are_added_start_from_the_same_model(tmp_path, command):
    weights = tmp_path / "model" / "model.safetensors"
    weights.parent.mkdir()
    weights.write_text("first")
    model = [f"policy.model_name={weights.parent}"]
    jobs = make_jobs(settings_of(["grpo"], model), [0, 1], tmp_path / "out")
    run_jobs(jobs[:1], tmp_path / "out", 1, command(0))
    keep_inputs(jobs[0].folder, model_files(weights.parent))
    check_unchanged(jobs)
    weights.write_text("second")
    with pytest.raises(UserError, match=r"is not the file that .*grpo-s0 .* choose another --out"):
        check_unchanged(jobs)


def test_end_of_a_process_in_words():
    assert (how_ended(1), how_ended(-15)) == ("exit code 1", "killed by SIGTERM")
    assert how_ended(-9).startswith("killed by SIGKILL, as the kernel does where memory")


def test_a_run_that_fails_is_reported_and_the_others_go_on(tmp_path, jobs, command):
    out = tmp_path / "out"
    (out / "runs").mkdir(parents=True)
    (out / "runs" / "fail-gpg-s0").touch()
    ended = run_jobs(jobs, out, 1, command(0))
    assert [ended[job.name].state for job in jobs] == ["finished", "failed", "finished", "finished"]
    assert (ended["gpg-s0"].exit_code, ended["gpg-s0"].error) == (2, "error: it broke")
    write_results(jobs, ended, out, "nemo-grpo compare x")
    assert "- gpg-s0: failed (exit code 2) error: it broke" in (out / "table.md").read_text()
    results = json.loads((out / "results.json").read_text())
    assert [(s["setting"], s["seeds"]) for s in results["settings"]] == [("grpo", ["0", "1"]), ("gpg", ["1"])]
    assert results["settings"][0]["final"] == {"values": [0.3, 0.3], "mean": 0.3, "std": 0.0}
    (out / "runs" / "fail-gpg-s0").unlink()
    assert {s.state for s in run_jobs(jobs, out, 1, command(0)).values()} == {"finished"}
    assert starts(jobs) == [1, 2, 1, 1]


def test_results_compare_every_setting_with_the_baseline(tmp_path, jobs, command):
    out = tmp_path / "out"
    ended = run_jobs(jobs, out, 2, command(0))
    for name, last in {"grpo-s0": 0.2, "grpo-s1": 0.4, "gpg-s0": 0.5, "gpg-s1": 0.71}.items():
        with (out / "runs" / name / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 4, "validation/accuracy": last}) + "\n")
    text = write_results(jobs, ended, out, "x").notes()
    assert "| minus grpo | final | best |" in (out / "table.md").read_text()
    assert "- gpg against grpo: better at 2 seeds by accuracy after the same steps, +0.305" in text
    forest = base64.b64encode((out / "plots" / "forest.png").read_bytes()).decode()
    page = (out / "report.html").read_text()
    assert forest in page
    assert "<h2>Against grpo, seed by seed</h2>" in page
    assert "<li>gpg against grpo: better at 2 seeds" in page
    text = write_results(jobs, ended, out, "x", baseline="gpg").notes()
    assert "- grpo against gpg: worse at 2 seeds" in text
    assert json.loads((out / "results.json").read_text())["paired"]["baseline"] == "gpg"
    with pytest.raises(UserError, match="cannot be written"):
        run_jobs(jobs, out / "table.md" / "out", 1, command(0))
    with pytest.raises(UserError, match="--baseline gpo is not one of the settings; did you mean 'grpo'"):
        write_results(jobs, ended, out, "x", baseline="gpo")
    write_results(jobs[:1], ended, out, "x")  # nothing to compare
    assert not (out / "plots" / "forest.png").exists()
    failed = {job.name: Status("failed", 1, "error: it broke") for job in jobs}
    for state in (ended, failed):  # only files that were written are named
        found = write_results(jobs, state, out, "x")
        assert all(file.is_file() for file in found.files)
        assert (out / "report.html" in found.files) == (out / "report.html").is_file() == bool(found.groups)


# Two runs at a time, of a second for each step, in a process group of their own, as a terminal's.
COMPARE = """
import json, sys
from functools import partial
from pathlib import Path
sys.path[:0] = json.loads(sys.argv[1])
import test_experiment_runner as tests
from nemo_grpo.experiments.jobs import make_jobs
from nemo_grpo.experiments.runner import run_jobs
folder = Path(sys.argv[2])
jobs = make_jobs(tests.settings_of(["grpo", "gpg"]), [0, 1], folder / "out")
ended = run_jobs(jobs, folder / "out", 2, partial(tests.command_of, folder, 30))
print(json.dumps({name: [status.state, status.exit_code] for name, status in ended.items()}))
"""


def test_ctrl_c_stops_all_and_the_next_call_continues(tmp_path, jobs, command):
    out = tmp_path / "out"
    command(0)  # writes the stand-in
    arguments = [json.dumps(sys.path), str(tmp_path)]
    with subprocess.Popen(
        [sys.executable, "-c", COMPARE, *arguments], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as compare:
        wait_for(lambda: all((job.folder / "metrics.jsonl").exists() for job in jobs[:2]))
        os.killpg(compare.pid, signal.SIGINT)
        ended = json.loads(compare.stdout.read())
    assert ended == {name: ["interrupted", 75] for name in ("grpo-s0", "gpg-s0")}
    states = {name: Status(*state) for name, state in ended.items()}
    assert finished_groups(jobs, states) == []
    assert "- grpo-s1: not started" in write_results(jobs, states, out, "x").notes()
    assert {s.state for s in run_jobs(jobs, out, 2, command(0)).values()} == {"finished"}
    assert starts(jobs) == [2, 2, 1, 1]
    steps = [json.loads(line)["step"] for line in (jobs[0].folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2, 3]  # it went on from where it stood


def test_two_calls_in_one_folder_are_refused(tmp_path, jobs, command):
    out = tmp_path / "out"
    out.mkdir()
    child = os.fork()
    if child == 0:  # a lock of this process would not keep this process out
        with (out / ".lock").open("w") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)
            (out / "locked").touch()
            time.sleep(30)
        os._exit(0)
    try:
        wait_for((out / "locked").exists)
        with pytest.raises(UserError, match="in use by another process"):
            run_jobs(jobs, out, 1, command(0))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_results_have_mean_and_sample_deviation_over_seeds(tmp_path, jobs, monkeypatch, capsys):
    for job, final in zip(jobs, (0.2, 0.5, 0.4, 0.5), strict=True):
        job.folder.mkdir(parents=True)
        rows = [{"step": 0, "validation/accuracy": 0.1}, {"step": 9, "validation/accuracy": final}]
        (job.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (job.folder / "recipe.resolved.yaml").write_text(job.recipe.to_yaml())
    ended = {job.name: Status("finished", 0) for job in jobs}
    found = write_results(jobs, ended, tmp_path / "out", "the command")
    text = (tmp_path / "out" / "table.md").read_text()
    # 0.2 and 0.4: mean 0.3, deviation 0.2 / sqrt 2 = 0.141
    final = "0.300 +- 0.141 | 0.300 +- 0.141 | +0.200 +- 0.141 | +0.100"
    assert f"| grpo | 0, 1 | 9 | 0.100 +- 0.000 | {final} |" in text
    assert "the command" in text
    for width, heads in ((60, [["grpo", "gpg"]]), (30, [["grpo"], ["gpg"]])):  # 10 columns, 16 for a setting
        monkeypatch.setenv("COLUMNS", str(width))
        show_results(found)
        printed = capsys.readouterr().out
        lines = printed.splitlines()
        assert [line.split()[1:] for line in lines if line.split()[:1] == ["setting"]] == heads
        assert max(map(len, lines)) <= width
        assert "\u2026" not in printed
