"""A report of runs of both engines: one recorded on NeMo-RL, others as the embedded engine writes them."""

import json
import re
import shutil
from pathlib import Path

import pytest

from nemo_grpo.recipe import load_recipe
from nemo_grpo.recipe.recipe import RECIPE_FILE
from nemo_grpo.report.report import write_report
from nemo_grpo.report.runs import ENTROPY, METRICS_FILE, common_key, group_runs, read_run
from nemo_grpo.report.summary import table

pytestmark = pytest.mark.usefixtures("undrawn")
RECORDED = Path(__file__).with_name("recorded_cluster_run.jsonl")
RECIPES = Path(__file__).parents[3] / "recipes"


@pytest.fixture
def cluster_run(tmp_path):
    """Steps 0, 1 and 10 of make cluster-quickstart, several rows each."""
    folder = tmp_path / "on-nemo-rl"
    folder.mkdir()
    shutil.copy(RECORDED, folder / METRICS_FILE)
    (folder / RECIPE_FILE).write_text(load_recipe(RECIPES / "cluster-quickstart.yaml").to_yaml())
    return folder


def embedded_run(folder, *overrides):
    rows = [
        {"step": 0, "validation/accuracy": 0.25},
        {"step": 1, "reward/mean": 0.5, "entropy/mean": 0.41, "logprob/mean": -0.375, "time/step": 30.0},
        {"step": 10, "reward/mean": 0.6, "entropy/mean": 0.21, "logprob/mean": -0.25},
    ]
    rows[2]["validation/accuracy"] = 0.5
    folder.mkdir()
    (folder / METRICS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / RECIPE_FILE).write_text(load_recipe(RECIPES / "quickstart.yaml", list(overrides)).to_yaml())
    return folder


def test_nemo_rl_rows_of_a_step_are_merged_under_embedded_names(cluster_run):
    run = read_run(cluster_run)
    assert list(run.rows) == [0, 1, 10]
    assert list(run.points("validation/accuracy")) == [0, 10]
    names = ("reward/mean", "loss/total", "grad_norm", "lr", "length/mean", "mismatch/kl", "covariance/p1")
    assert {name: list(run.points(name)) for name in names} == {name: [1, 10] for name in names}
    assert run.points("time/step").keys() == {1, 10}


def test_sampled_entropy_is_what_nemo_rl_estimates(cluster_run):
    run = read_run(cluster_run)
    ours, theirs = run.points("entropy/sampled"), run.points("train/approx_entropy")
    assert ours.keys() == theirs.keys() == {1, 10}
    for step in ours:
        assert ours[step] == pytest.approx(theirs[step], rel=0.01)  # theirs weighs by the ratio to vLLM's
    assert run.points("entropy/mean") == {}


def test_groups_of_both_engines_are_named_by_engine_then_by_setting(cluster_run, tmp_path):
    fp32 = embedded_run(tmp_path / "a")
    bf16 = embedded_run(tmp_path / "b", "policy.precision=bfloat16")
    runs = [read_run(path) for path in (cluster_run, fp32, bf16)]

    def labels(of):
        return [group.label for group in group_runs(of)]

    precisions = ['(precision "float32")', '(precision "bfloat16")']
    assert labels(runs) == ["grpo, NeMo-RL", *(f"grpo, embedded {precision}" for precision in precisions)]
    assert labels(runs[:2]) == ["grpo, NeMo-RL", "grpo, embedded"]
    assert labels(runs[1:]) == [f"grpo {precision}" for precision in precisions]


def test_entropy_is_compared_by_the_estimate_that_both_have(cluster_run, tmp_path):
    embedded = read_run(embedded_run(tmp_path / "a"))
    both, alone = group_runs([read_run(cluster_run), embedded]), group_runs([embedded])
    assert common_key(both, ENTROPY) == "entropy/sampled"
    head, rows = table(both)
    assert rows[1][head.index("sampled entropy, last")] == "0.250"
    head, rows = table(alone)
    assert rows[0][head.index("entropy, last")] == "0.210"


def test_report_overlays_both_engines(cluster_run, tmp_path):
    out = write_report([cluster_run, embedded_run(tmp_path / "a")], tmp_path / "out" / "report.html")
    page = out.read_text()
    assert "<title>grpo, NeMo-RL vs grpo, embedded</title>" in page
    assert re.search(r"<td>grpo, NeMo-RL</td>", page)
    assert "nemo_grpo.target" in page  # among the settings that differ
    drawn = {path.stem for path in (tmp_path / "out" / "plots").glob("*.png")}
    assert {"learning_curve", "reward", "entropy", "length", "grad_norm", "overview"} <= drawn
