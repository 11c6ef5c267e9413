"""What a report makes of diagnostics.jsonl, and the report in a browser."""

import json

import numpy as np
import pytest
import yaml

from nemo_grpo.report.report import write_report
from nemo_grpo.report.runs import group_runs, read_run
from nemo_grpo.report.token_plots import (
    covariance_rows,
    gradient_rows,
    gradient_spread,
    group_mean,
    token_rows,
)


def look(step, first):
    entry = ["<b>", 7, 0.25, 0.5]
    return {
        "step": step,
        "num_tokens": 9,
        "covariance": {"share": [0.01, 1.0], "positive": [first, 0.1], "negative": [-2 * first, -0.1]},
        "cumulative": {"share": [0.01, 1.0], "covariance": [0.3, 1.0], "gradient": [0.2, 1.0]},
        "probability": {"tokens": [0.5, 0.5], "coefficient": [1.0, first], "gradient": [0.9, 0.1]},
        "tokens": {name: [entry] for name in ("likely", "unlikely", "covariance", "gradient")},
    }


@pytest.fixture
def runs(tmp_path):
    """Two seeds of one variant, two looks each."""
    folders = []
    for seed, firsts in enumerate(((2.0, 4.0), (4.0, 6.0))):
        folder = tmp_path / f"s{seed}"
        folder.mkdir()
        norms = (1.0, 1.0, 4.0, 1.0)
        rows = [{"step": s, "grad_norm": n, "validation/accuracy": 0.1 * s} for s, n in enumerate(norms)]
        looks = [look(step, first) for step, first in zip((1, 20), firsts, strict=True)]
        damaged = [{"step": 21}, {key: value for key, value in look(22, 9.0).items() if key != "step"}]
        looks[:0] = [look(1, 7.0)]  # measured again after a kill: the last one counts
        for name, lines in (("metrics", rows), ("diagnostics", [*looks, *damaged])):
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        recipe = {"grpo": {"seed": seed}, "loss_fn": {"variant": "tr_grpo"}}
        (folder / "recipe.resolved.yaml").write_text(yaml.safe_dump(recipe))
        folders.append(folder)
    return folders


def test_looks_are_averaged_within_a_run_and_spread_over_seeds(runs):
    group = group_runs([read_run(path) for path in runs])[0]
    assert [len(run.diagnostics) for run in group.runs] == [2, 2]  # a step without tokens is no look
    found = group_mean(group, "covariance", "positive")
    assert found[0].tolist() == [4.0, 0.1]  # means 3 and 5
    assert found[1].tolist() == pytest.approx([2**0.5, 0.0])


def test_a_mean_over_tokens_counts_steps_by_their_tokens_and_nothing_where_there_are_none(runs):
    rows = [look(1, 3.0), look(20, 0.0)]
    rows[0]["probability"]["tokens"] = [0.0, 1.0]
    rows[1] |= {"num_tokens": 27, "probability": {"tokens": [0.0, 1 / 9], "coefficient": [0.0, 1.0]}}
    (runs[0] / "diagnostics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    group = group_runs([read_run(runs[0])])[0]
    mean, _ = group_mean(group, "probability", "coefficient", "tokens")
    assert mean.tolist() == [None, pytest.approx(2.5)]  # 9 tokens of 3, 3 of 1


def test_tables_of_covariance_and_tokens(runs):
    groups = group_runs([read_run(path) for path in runs])
    head, rows = covariance_rows(groups)
    assert head == ["setting", "covariance", "1 %", "100 %"]
    assert rows == [["tr_grpo", "positive", "4.00", "0.10"], ["tr_grpo", "negative", "-8.00", "-0.10"]]
    head, rows = token_rows(groups, "likely")
    assert head == ["rank", "tr_grpo, step 20", "count", "probability", "share"]
    assert rows == [["1", "'<b>'", "7", "0.250", "0.5000"]]


def test_gradient_spread_counts_spikes_above_three_medians(runs):
    mean, std, cv, peak, spikes = gradient_spread(np.array([1.0, 1.0, 4.0, 1.0]))
    assert (mean, peak, spikes) == (1.75, 4.0, 25.0)
    assert std == pytest.approx(27**0.5 / 4)  # ((3 x 0.75^2 + 2.25^2) / 4)^0.5 = (6.75 / 4)^0.5
    assert cv == pytest.approx(std / mean)
    assert gradient_spread(np.zeros(3)) == (0, 0, 0, 0, 0)
    assert gradient_rows(group_runs([read_run(runs[0])]))[1] == [
        ["tr_grpo", "1.75", "1.3", "0.742", "4", "25"]
    ]


@pytest.mark.usefixtures("undrawn")
def test_report_has_the_tables_and_pictures_of_the_tokens(runs, tmp_path):
    page = write_report(runs, tmp_path / "out" / "report.html").read_text()
    assert "Covariance that a share of the tokens reaches" in page
    assert "&lt;b&gt;" in page
    assert "<b>" not in page  # a token's text is never markup
    names = {path.stem for path in (tmp_path / "out" / "plots").iterdir()}
    assert {"cumulative_covariance", "gradient_share", "token_coefficient", "grad_norm"} <= names
    for folder in runs:
        (folder / "diagnostics.jsonl").unlink()
    page = write_report(runs, tmp_path / "out" / "report.html").read_text()
    assert "Tokens that stand out" not in page
    assert not (tmp_path / "out" / "plots" / "gradient_share.png").exists()
