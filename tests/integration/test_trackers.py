"""wandb and mlflow in their own offline modes; tensorboard's events."""

import importlib.util
import sqlite3

import pytest
from processes import nemo_grpo, output_of
from small_runs import QUICKSTART, rows

from nemo_grpo.recipe import load_recipe
from nemo_grpo.run import trackers
from nemo_grpo.run.folder import RunFolder
from nemo_grpo.support.errors import UserError

QUICK = ["grpo.val_at_start=false", "checkpointing.save_period=1"]
INSTALLED = {name: importlib.util.find_spec(name) is not None for name in ("wandb", "mlflow")}


def needs(name):
    return pytest.mark.skipif(not INSTALLED[name], reason=f"needs {name}: pip install 'nemo-grpo[trackers]'")


def train_resumed(folder, *changes):
    """A run's folder after a step, and another of a second start; wandb leaves threads and a service."""
    for more in (["grpo.max_num_steps=1"], ["grpo.max_num_steps=2", "--resume"]):
        output_of(nemo_grpo("train", "quickstart", *QUICK, *changes, *more, cwd=folder, HOME=str(folder)))
    return folder / "runs/quickstart"


@pytest.mark.slow
@needs("wandb")
def test_wandb_writes_offline_where_there_is_no_login_and_a_resumed_run_keeps_its_id(tmp_path):
    run = train_resumed(
        tmp_path, "++logger.wandb_enabled=true", "++logger.wandb={project: mine, name: first}"
    )
    runs = sorted(path.name for path in (run / "wandb").glob("offline-run-*"))
    identity = (run / "wandb-run-id").read_text()
    assert len(runs) == 2
    assert all(name.endswith(f"-{identity}") for name in runs)
    assert any((run / "wandb" / runs[0]).glob("*.wandb"))


@pytest.mark.slow
@needs("mlflow")
def test_mlflow_has_every_metric_of_every_step_in_one_run(tmp_path):
    mlflow = "++logger.mlflow={experiment_name: mine, run_name: first}"
    run = train_resumed(tmp_path, "++logger.mlflow_enabled=true", mlflow)
    with sqlite3.connect(run / "mlflow.db") as database:
        stored = database.execute("select step, value from metrics where key = 'reward/mean' order by step")
        assert stored.fetchall() == [(row["step"], row["reward/mean"]) for row in rows(run)]
        keys = {key for (key,) in database.execute("select distinct key from metrics")}
        assert "validation/pass_8" in keys
        assert database.execute("select count(*) from runs").fetchone() == (1,)
    database.close()


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_refused_before_the_run(name, monkeypatch):
    recipe = load_recipe(QUICKSTART, [f"++logger.{name}_enabled=true"])
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(UserError, match=rf"logger\.{name}_enabled=true: .* has no {name}; pip install"):
        trackers.check_trackers(recipe)


class Broken:
    def __init__(self, *_):
        self.rows = []

    def log(self, row, step):
        self.rows.append(step)
        raise ConnectionError("the server is gone")

    def close(self, ended):
        raise AssertionError


class Unreachable:
    def __init__(self, *_):
        raise ConnectionError("the server is gone")


@pytest.mark.parametrize("broken", [Broken, Unreachable])
def test_a_tracker_that_fails_costs_neither_the_run_nor_the_other_trackers(
    tmp_path, monkeypatch, caplog, broken
):
    recipe = load_recipe(QUICKSTART, ["++logger.wandb_enabled=true"])
    monkeypatch.setattr(trackers, "WandB", broken)
    run = RunFolder(tmp_path / "run")
    run.open("", from_step=-1, trackers=lambda folder: trackers.open_trackers(recipe, folder, -1))
    for step in (1, 2):
        run.append_metrics({"step": step, "reward/mean": 0.5})
    run.close()
    assert caplog.text.count("wandb gets no more metrics of this run: the server is gone") == 1
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 2
    assert list((tmp_path / "run/tensorboard").glob("events*"))


def test_wandb_is_online_only_with_a_login(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert not trackers._has_login()
    (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password x\n")
    assert trackers._has_login()
