"""What a report makes of diagnostics.jsonl, and the report in a browser."""

import json
import re
import shutil
import subprocess

import numpy as np
import pytest
import yaml

from nemo_grpo.report.report import PANELS, write_report
from nemo_grpo.report.runs import group_runs, read_run
from nemo_grpo.report.token_plots import (
    covariance_rows,
    gradient_rows,
    gradient_spread,
    group_mean,
    token_rows,
)

BROWSERS = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome")
BROWSER = next((path for name in BROWSERS if (path := shutil.which(name))), None)


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
        for name, lines in (("metrics", rows), ("diagnostics", [*looks, *damaged])):
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        recipe = {"grpo": {"seed": seed}, "loss_fn": {"variant": "tr_grpo"}}
        (folder / "recipe.resolved.yaml").write_text(yaml.safe_dump(recipe))
        folders.append(folder)
    return folders


def test_of_a_step_that_a_resumed_run_measured_again_the_last_look_counts(runs):
    with (runs[0] / "diagnostics.jsonl").open("a") as file:
        file.write(json.dumps(look(1, 7.0)) + "\n")
    diagnostics = read_run(runs[0]).diagnostics
    assert [(one["step"], one["covariance"]["positive"][0]) for one in diagnostics] == [(1, 7.0), (20, 4.0)]


def test_looks_are_averaged_within_a_run_and_spread_over_seeds(runs):
    group = group_runs([read_run(path) for path in runs])[0]
    assert [len(run.diagnostics) for run in group.runs] == [2, 2]  # a step without tokens is no look
    found = group_mean(group, "covariance", "positive")
    assert found is not None
    assert found[0].tolist() == [4.0, 0.1]  # means 3 and 5
    assert found[1].tolist() == pytest.approx([2**0.5, 0.0])
    assert group_mean(group, "covariance", "nothing") is None


def test_a_mean_over_tokens_counts_steps_by_their_tokens_and_nothing_where_there_are_none(runs):
    rows = [look(1, 3.0), look(20, 0.0)]
    rows[0]["probability"]["tokens"] = [0.0, 1.0]
    rows[1] |= {"num_tokens": 27, "probability": {"tokens": [0.0, 1 / 9], "coefficient": [0.0, 1.0]}}
    (runs[0] / "diagnostics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    group = group_runs([read_run(runs[0])])[0]
    mean, _ = group_mean(group, "probability", "coefficient", "tokens")
    assert mean.tolist() == [None, pytest.approx(2.5)]  # 9 tokens of 3, 3 of 1


def test_covariance_table_has_the_papers_form(runs):
    head, rows = covariance_rows(group_runs([read_run(path) for path in runs]))
    assert head == ["setting", "covariance", "1 %", "100 %"]
    assert rows == [["tr_grpo", "positive", "4.00", "0.10"], ["tr_grpo", "negative", "-8.00", "-0.10"]]


def test_gradient_spread_counts_spikes_above_three_medians(runs):
    mean, std, cv, peak, spikes = gradient_spread(np.array([1.0, 1.0, 4.0, 1.0]))
    assert (mean, peak, spikes) == (1.75, 4.0, 25.0)
    assert std == pytest.approx(27**0.5 / 4)  # ((3 x 0.75^2 + 2.25^2) / 4)^0.5 = (6.75 / 4)^0.5
    assert cv == pytest.approx(std / mean)
    assert gradient_spread(np.zeros(3)) == (0, 0, 0, 0, 0)
    assert gradient_rows(group_runs([read_run(runs[0])]))[1] == [
        ["tr_grpo", "1.75", "1.3", "0.742", "4", "25"]
    ]


def test_token_table_is_of_the_last_look(runs):
    head, rows = token_rows(group_runs([read_run(path) for path in runs]), "likely")
    assert head == ["rank", "tr_grpo, step 20", "count", "probability", "share"]
    assert rows == [["1", "'<b>'", "7", "0.250", "0.5000"]]


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


@pytest.mark.parametrize(("width", "columns"), [(500, 1), (1600, 3)])
def test_report_opens_in_a_browser(width, columns, runs, tmp_path):
    if BROWSER is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    page = write_report(runs, tmp_path / "out" / "report.html")
    # The page carries no script, so this one is the test's: what the browser made of tables and pictures.
    probe = "<script>addEventListener('load', () => { document.title = JSON.stringify({"
    probe += "images: [...document.images].map(i => [i.alt, i.naturalWidth, i.complete]),"
    probe += "columns: new Set([...document.images].map(i => i.x)).size,"
    probe += "tables: [...document.querySelectorAll('table')].map(t => t.rows.length),"
    probe += "wide: document.documentElement.scrollWidth > innerWidth}) })</script></body>"
    opened = tmp_path / "opened.html"
    opened.write_text(page.read_text().replace("</body>", probe))
    (tmp_path / "out" / "plots").rename(tmp_path / "elsewhere")  # the file needs nothing beside it
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    command += [f"--window-size={width},900", "--virtual-time-budget=5000", "--dump-dom", opened.as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    title = re.search(r"<title>(.*?)</title>", result.stdout, re.DOTALL)
    assert title is not None, result.stderr[-2000:]
    seen = json.loads(title[1].replace("&amp;", "&").replace("&quot;", '"'))
    names = [name for name, _, _ in seen["images"]]
    assert names == [panel.title for panel in PANELS if panel.title in names]
    assert len(names) == len(list((tmp_path / "elsewhere").iterdir())) - 1  # without the overview
    assert all(pixels > 500 and complete for _, pixels, complete in seen["images"])
    assert seen["columns"] == columns
    assert seen["tables"][0] == 2  # head and one group
    assert len(seen["tables"]) >= 7  # summary, gradient norm, covariance, four lists of tokens
    assert not seen["wide"]
