"""Jobs run, failed, stopped and continued; stand-ins for training runs keep it fast."""

import base64
import fcntl
import json
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from functools import partial

import pytest
from processes import ROOT, wait_for

from nemo_grpo.cli.compare import show_results
from nemo_grpo.engine.resume import keep_inputs, model_files
from nemo_grpo.experiments.jobs import Status, make_jobs
from nemo_grpo.experiments.results import finished_groups, write_results
from nemo_grpo.experiments.runner import check_unchanged, run_experiment, run_jobs
from nemo_grpo.experiments.sweep import sweep_variants, with_overrides
from nemo_grpo.support.errors import UserError, how_ended

pytestmark = pytest.mark.usefixtures("undrawn")
QUICKSTART = ROOT / "recipes" / "quickstart.yaml"


def settings_of(variants, overrides=()):
    return with_overrides(sweep_variants(QUICKSTART, variants, [0]).settings, overrides)


# Makes steps one by one from where it stands; SIGTERM ends it with exit code 75, a file fail-NAME breaks it.
RUN = """
import json, signal, sys, time
from pathlib import Path
folder, recipe, seconds = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
folder.mkdir(parents=True, exist_ok=True)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
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


@pytest.fixture
def command(tmp_path):
    (tmp_path / "run.py").write_text(RUN)

    def of(seconds, job):
        resolved = tmp_path / f"{job.name}.yaml"
        asked = job.recipe.policy.precision
        resolved.write_text(job.recipe.with_precision(asked.replace("auto", "bfloat16")).to_yaml())
        return [sys.executable, str(tmp_path / "run.py"), str(job.folder), str(resolved), str(seconds)]

    return lambda seconds: partial(of, seconds)


@contextmanager
def stopped_when(begun):
    """This process gets SIGTERM once the jobs have begun."""

    def wait():
        wait_for(begun)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=wait)
    thread.start()
    yield
    thread.join()


def starts(jobs):
    files = [job.folder / "starts" for job in jobs]
    return [len(file.read_text()) if file.exists() else 0 for file in files]


def test_finished_runs_are_not_run_again_unless_the_recipe_has_changed(tmp_path, jobs, command):
    out = tmp_path / "out"
    assert {s.state for s in run_jobs(jobs[:3], out, 2, command(0)).values()} == {"finished"}
    ended = run_jobs(jobs, out, 2, command(0))
    assert starts(jobs) == [1, 1, 1, 1]
    assert list(ended) == [job.name for job in jobs]
    longer = make_jobs(settings_of(["grpo"], ["grpo.max_num_steps=999"]), [0], out)
    run_jobs(longer, out, 1, command(0))
    assert starts(jobs) == [2, 1, 1, 1]


def test_a_finished_run_that_chose_its_precision_is_not_run_again(tmp_path, command):
    out = tmp_path / "out"
    jobs = make_jobs(settings_of(["grpo"], ["policy.precision=auto"]), [0], out)
    for _ in range(2):
        run_jobs(jobs, out, 1, command(0))
        check_unchanged(jobs)
    assert starts(jobs) == [1]
    with pytest.raises(UserError, match=r"precision: bfloat16 -> float32; undo that, or choose another"):
        check_unchanged(make_jobs(settings_of(["grpo"]), [0], out))


CONSTANT = "policy.megatron_cfg.scheduler.lr_decay_style=constant"


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ([], ["policy.generation.val_temperature=5"], r"generation\.val_temperature: 1\.0 -> 5\.0; undo"),
        ([], ["grpo.max_num_steps=999"], r"grpo\.max_num_steps: 160 -> 999"),  # the learning rate would jump
        ([CONSTANT], [CONSTANT, "grpo.max_num_steps=2"], r"=2: .* has made 3 steps; raise it, or"),
        ([CONSTANT], [CONSTANT, "grpo.max_num_steps=999"], None),
        ([], ["logger.tensorboard_enabled=false", "policy.train_micro_batch_size=8"], None),
    ],
)
def test_a_mean_is_of_runs_that_trained_and_validated_alike(tmp_path, command, before, now, said):
    out = tmp_path / "out"

    def jobs(overrides):
        return make_jobs(settings_of(["grpo"], overrides), [0], out)

    run_jobs(jobs(before), out, 1, command(0))
    kept = (out / "runs/grpo-s0/recipe.resolved.yaml").read_text()
    if said:
        with pytest.raises(UserError, match=said):
            run_experiment(jobs(now), out, num_parallel=1, command="x")
        assert (out / "runs/grpo-s0/recipe.resolved.yaml").read_text() == kept
        return
    check_unchanged(jobs(now))
    run_jobs(jobs(now), out, 1, command(0))
    assert starts(jobs(now)) == [2 if "grpo.max_num_steps=999" in now else 1]


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


def test_a_signal_stops_all_and_the_next_call_continues(tmp_path, jobs, command):
    out = tmp_path / "out"
    with stopped_when(lambda: all((job.folder / "metrics.jsonl").exists() for job in jobs[:2])):
        ended = run_jobs(jobs, out, 2, command(30))
    told = {name: (s.state, s.exit_code) for name, s in ended.items()}
    assert told == dict.fromkeys(("grpo-s0", "gpg-s0"), ("interrupted", 75))
    assert finished_groups(jobs, ended) == []
    assert "- grpo-s1: not started" in write_results(jobs, ended, out, "x").notes()
    assert {s.state for s in run_jobs(jobs, out, 2, command(0)).values()} == {"finished"}
    assert starts(jobs) == [2, 2, 1, 1]
    steps = [json.loads(line)["step"] for line in (jobs[0].folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2, 3]  # it went on from where it stood


@pytest.mark.parametrize("handler", ["", "signal.signal(15, lambda *_: sys.exit(143)); "])  # as a launcher
def test_a_run_that_a_signal_ends_while_it_starts_is_no_failure(tmp_path, jobs, handler):
    begun = tmp_path / "begun"
    lines = f"import signal, sys, time; {handler}open({str(begun)!r}, 'w'); time.sleep(60)"
    starting = [sys.executable, "-c", lines]
    with stopped_when(begun.exists):
        ended = run_jobs(jobs, tmp_path / "out", 1, lambda _: starting)
    assert {name: s.state for name, s in ended.items()} == {"grpo-s0": "interrupted"}


def test_runs_of_an_older_recipe_stay_out_of_the_table_of_a_stopped_call(tmp_path, jobs, command):
    out = tmp_path / "out"
    assert finished_groups(jobs, run_jobs(jobs, out, 2, command(0)))
    longer = make_jobs(settings_of(["grpo", "gpg"], ["grpo.max_num_steps=999"]), [0, 1], out)
    begun = longer[0].folder / "starts"
    (longer[0].folder / "metrics.jsonl").unlink()  # so that it has steps to make
    with stopped_when(lambda: begun.read_text() == "xx"):
        ended = run_jobs(longer, out, 1, command(30))
    assert {status.state for status in ended.values()} == {"interrupted"}
    assert finished_groups(longer, ended) == []
    assert finished_groups(jobs, run_jobs(jobs, out, 2, command(0)))


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
