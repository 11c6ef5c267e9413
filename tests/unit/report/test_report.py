"""Runs read back, grouped, drawn and tabled."""

import base64
import json
import logging
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from matplotlib.backends.backend_agg import FigureCanvasAgg
from typer.testing import CliRunner

from nemo_grpo.cli import app
from nemo_grpo.report import plots
from nemo_grpo.report.plots import common_key, running_mean
from nemo_grpo.report.report import panels_of, plot_run, write_report
from nemo_grpo.report.runs import Measure, RunGroup, RunLog, group_runs, measure_of, read_run
from nemo_grpo.support.errors import UserError
from nemo_grpo.support.pictures import new_figure

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture
def make_run(tmp_path):
    """Write a run's folder: rows of metrics.jsonl, and a recipe unless ``variant`` is None."""

    def make(name, rows, variant="grpo", seed=0, lr=1e-3, tail=""):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
        if variant is not None:
            recipe = {"grpo": {"seed": seed}, "loss_fn": {"variant": variant}, "policy": {"lr": lr}}
            recipe["nemo_grpo"] = {"run_name": name}
            (folder / "recipe.resolved.yaml").write_text(yaml.safe_dump(recipe))
        return folder

    return make


def accuracy(*values):
    return [{"step": 10 * i, "validation/accuracy": value} for i, value in enumerate(values)]


def cells(page):
    """Rows of the first table, tags and entities taken away."""
    table = page.split("<table>")[1].split("</table>")[0].replace("&plusmn;&nbsp;", "+- ")
    return [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in table.split("<tr>")[1:]]


def test_rows_of_one_step_are_joined_and_the_later_wins(make_run):
    rows = [{"step": 2, "x": 1.0, "y": 5.0}, {"step": 1, "x": 3.0}, {"step": 2, "x": 2.0}]
    run = read_run(make_run("a", rows))
    assert list(run.points("x")) == [1, 2]
    assert run.points("y") == {2: 5.0}


@pytest.mark.parametrize(
    ("tail", "points", "warned"),
    [
        ('{"step": 2, "x', {1: 1.0}, False),  # cut by a kill
        ('{"step": 2,\n[1]\n{"x": 9}\n{"step": 3, "x": 4.0}\n', {1: 1.0, 3: 4.0}, True),
        ('{"step": 2, "x": null}\n{"step": 3}\n{"step": 4, "x": NaN}\n', {1: 1}, False),
    ],
)
def test_lines_and_values_that_cannot_be_read_are_left_out(make_run, caplog, tail, points, warned):
    with caplog.at_level(logging.WARNING):
        run = read_run(make_run("a", [{"step": 1, "x": 1.0}], tail=tail))
    assert run.points("x") == points
    assert ("line 2" in caplog.text) is warned
    assert bool(caplog.records) is warned


def test_folder_without_metrics_is_refused(tmp_path, make_run):
    with pytest.raises(UserError, match=r"holds no metrics\.jsonl; give the folder of a run"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(UserError, match="holds no step yet"):
        read_run(make_run("empty", []))


def test_run_without_a_readable_recipe_is_labelled_by_its_folder(make_run):
    plain = make_run("plain", accuracy(0.5), variant=None)
    broken = make_run("broken", accuracy(0.5))
    (broken / "recipe.resolved.yaml").write_text("a: [")
    assert [group.label for group in group_runs([read_run(plain), read_run(broken)])] == ["plain", "broken"]


def test_runs_that_differ_in_seed_and_name_only_are_one_group(make_run):
    made = [("a", "grpo", 0), ("b", "gpg", 0), ("c", "grpo", 1)]
    runs = [read_run(make_run(name, accuracy(0.1), variant, seed)) for name, variant, seed in made]
    groups = [(g.label, [r.path.name for r in g.runs]) for g in group_runs(runs)]
    assert groups == [("grpo", ["a", "c"]), ("gpg", ["b"])]
    other = read_run(make_run("d", accuracy(0.1), lr=0.5))
    labels = [g.label for g in group_runs([runs[0], other, runs[1]])]
    assert labels == ["grpo (lr 0.001)", "grpo (lr 0.5)", "gpg"]


def test_group_curve_is_mean_and_sample_deviation_on_common_steps(make_run):
    paths = [make_run("a", accuracy(0.2, 0.4, 0.9)), make_run("b", accuracy(0.4, 0.8), seed=1)]
    steps, mean, spread = group_runs([read_run(path) for path in paths])[0].curve("validation/accuracy")
    assert steps.tolist() == [0, 10]
    assert mean.tolist() == pytest.approx([0.3, 0.6])
    assert spread.tolist() == pytest.approx([0.2 / 2**0.5, 0.4 / 2**0.5])  # ddof 1: |a - b| / sqrt(2)
    (alone,) = group_runs([read_run(paths[0])])
    assert alone.curve("validation/accuracy")[2].tolist() == [0, 0, 0]
    assert [len(part) for part in alone.curve("nothing")] == [0, 0, 0]


def test_summary_table_has_mean_and_deviation_over_seeds(make_run, tmp_path):
    def rows(start, peak, end, greedy):
        last = {"validation/greedy": greedy, "validation/pass@4": 0.9, "time/validation": 30.0}
        values = accuracy(start, peak, end)
        return [values[0], {**values[1], "time/step": 60.0}, {**values[2], **last}]

    paths = [make_run("a", rows(0.1, 0.6, 0.5, 0.7)), make_run("b", rows(0.3, 0.8, 0.7, 0.9), seed=1)]
    paths.append(make_run("c", accuracy(0.25), "gpg"))
    page = write_report(paths, tmp_path / "out" / "report.html").read_text()
    head, grpo, gpg = cells(page)
    assert head[:7] == ["setting", "seed numbers", "steps", "start", "best", "final", "gain"]
    assert head[7:] == ["least gain", "greedy", "pass@4", "minutes"]
    assert grpo[:3] == ["grpo", "0, 1", "20"]
    # two values a and b: mean (a + b) / 2, sample deviation |a - b| / sqrt 2 = 0.1414 for a distance of 0.2
    assert grpo[3:6] == ["0.200 +- 0.141", "0.700 +- 0.141", "0.600 +- 0.141"]
    assert grpo[6:] == ["+0.400 +- 0.000", "+0.400", "0.800 +- 0.141", "0.900 +- 0.000", "1.5 +- 0.0"]
    assert gpg == ["gpg", "0", "0", "0.250", "0.250", "0.250", "-", "-", "-", "-", "-"]
    assert "Settings that differ" in page
    assert "loss_fn.variant" in page


def judged_by(folder, metric, *, higher):
    file = folder / "recipe.resolved.yaml"
    ranking = {"metric_name": metric, "higher_is_better": higher}
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"checkpointing": ranking}))


def test_runs_are_judged_by_the_metric_that_ranks_their_checkpoints(make_run, tmp_path):
    """Losses 3, 1, 2 and 5, 4, 4.5: the best is the smallest, the least gain the one nearest to a rise."""
    keys = ("validation/accuracy", "validation/mine.py:cost")
    rows = [
        [{"step": 10 * i, **dict(zip(keys, (0.5, value), strict=True))} for i, value in enumerate(values)]
        for values in ((3.0, 1.0, 2.0), (5.0, 4.0, 4.5))
    ]
    paths = [make_run(name, rows[seed], seed=seed) for seed, name in enumerate("ab")]
    for path in paths:
        judged_by(path, "val:mine.py:cost", higher=False)
    page = write_report(paths, tmp_path / "report.html").read_text()
    head, row = cells(page)
    assert head[3:9] == ["start", "best", "final", "gain", "least gain", "accuracy"]
    assert row[4:9] == [
        *("2.500 +- 2.121", "3.250 +- 1.768", "-0.750 +- 0.354", "-0.500", "0.500 +- 0.000"),
    ]
    assert "of validation/mine.py:cost, as the recipe ranks, where lower is better." in page
    assert (tmp_path / "plots" / "judged.png").is_file()
    judged_by(paths[0], "val:accuracy", higher=True)
    assert measure_of(group_runs([read_run(path) for path in paths])) == Measure(), "they disagree"
    for metric in ("train:reward", None, "val:not_there"):
        judged_by(paths[0], metric, higher=False)
        assert measure_of(group_runs([read_run(paths[0])])) == Measure()


def test_report_is_one_file_with_each_picture_inside_once(make_run):
    folder = make_run(
        "a", [{"step": s, "reward/mean": 0.1 * s, **a} for s, a in enumerate(accuracy(0, 1))], "<grpo>"
    )
    page = plot_run(folder).read_text()
    names = ["learning_curve.png", "overview.png", "reward.png"]
    assert sorted(p.name for p in (folder / "plots").iterdir()) == names
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert base64.b64decode(pictures[0]) == (folder / "plots" / "learning_curve.png").read_bytes()
    assert base64.b64decode(pictures[1]) == (folder / "plots" / "reward.png").read_bytes()
    assert len(pictures) == 2
    assert 'src="http' not in page
    assert "<grpo>" not in page
    assert "&lt;grpo&gt;" in page


def test_a_panel_that_is_always_zero_is_named_in_place_of_its_picture(make_run, tmp_path):
    """Not where one step of one run differs, nor for a held-out accuracy, whose 0 is the result."""
    zeros = {"ratio/clip_fraction": 0.0, "rollout/all_wrong": 0.0, "reward/mean": 0.0, **accuracy(0.0)[0]}
    rows = [{"step": step, **zeros, "grad_norm": 1.0} for step in range(3)]
    run = make_run("a", rows)
    other = make_run("b", [*rows[:2], rows[2] | {"reward/mean": 0.5}], lr=1.0)
    page = write_report([run, other], tmp_path / "report.html").read_text()
    assert "0 at every step, so not drawn: Clipped tokens, Problems too hard." in page
    pictures = {path.name for path in (tmp_path / "plots").iterdir()}
    assert {"reward.png", "grad_norm.png", "learning_curve.png"} <= pictures
    assert not {"clip_fraction.png", "all_wrong.png"} & pictures
    write_report([make_run("c", [rows[0] | {"ratio/clip_fraction": 0.1, "rollout/all_wrong": 0.1}]), other],
                 tmp_path / "report.html")  # fmt: skip
    assert (tmp_path / "plots/clip_fraction.png").exists()


def test_a_report_ends_with_commands_that_start_what_comes_next(make_run, tmp_path):
    page = write_report([make_run("a", accuracy(0.5))], tmp_path / "report.html").read_text()
    commands = re.findall(r"<code>(.*?)</code>", page.partition("<h2>Next</h2>")[2])
    words = [command.split() for text in commands for command in text.split(", ")]
    assert [word[1] for word in words] == ["compare", "recipe", "plan", "launch"]
    assert page.rstrip().endswith("</ul>\n</body></html>")
    for name in ("compare", "plan", "launch"):
        assert CliRunner().invoke(app, [name, "--help"]).exit_code == 0


def test_one_run_is_named_and_only_its_columns_are_explained(make_run, tmp_path):
    first, second = make_run("a", accuracy(0.1, 0.2)), make_run("b", accuracy(0.1, 0.3), seed=1)
    alone = write_report([first], tmp_path / "alone.html").read_text()
    assert f"<p class=sub>{first}</p>" in alone
    assert "best is the largest" in alone
    assert not any(word in alone for word in ("least gain", "over seeds"))
    both = write_report([first, second], tmp_path / "both.html").read_text()
    assert f"<summary>2 runs</summary>{first}<br>{second}</details>" in both
    assert "least gain is the smallest of the seeds. &plusmn;&nbsp;is the sample" in both


def test_each_reward_component_and_validation_set_has_a_panel(make_run, tmp_path):
    core = ("reward/mean", "reward/std", "reward/group_std", "reward/not_finite", "validation/accuracy")
    own = ["reward/accuracy", "reward/my/own.py:short"]
    own += ["validation/aime24/accuracy", "validation/amc/accuracy"]
    rows = [{"step": step, **dict.fromkeys((*core, *own), 0.1 * step)} for step in (1, 2)]
    run = make_run("a", rows)
    titles = {panel.title for panel in panels_of(group_runs([read_run(run)])) if panel.name != "reward_std"}
    assert {
        *("Training reward", "Reward component accuracy", "Reward component my/own.py:short"),
        *("Held-out accuracy", "Held-out accuracy of aime24", "Held-out accuracy of amc"),
    } == {title for title in titles if title.startswith(("Training reward", "Reward", "Held-out acc"))}
    page = plot_run(run).read_text()
    assert cells(page)[0][-2:] == ["aime24", "amc"]
    assert cells(page)[1][-2:] == ["0.200", "0.200"]
    drawn = {path.name for path in (run / "plots").iterdir()}
    assert {"component-my%2Fown.py%3Ashort.png", "validation_set-aime24.png"} <= drawn
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/mean": 0.5}) + "\n")
    plot_run(run)
    assert {path.name for path in (run / "plots").iterdir()} == {"reward.png", "overview.png"}


def test_metrics_of_an_own_loss_have_panels(make_run):
    names = ("mine/spread", "loss/total", "gpg/alpha", "steps/skipped", "kept/reward/mean", "reward/x.py:f")
    rows = [{"step": 1, **dict.fromkeys(names, 0.5)}]
    titles = {
        variant: [panel.title for panel in panels_of(group_runs([read_run(make_run(name, rows, variant))]))]
        for name, variant in (("a", "my_loss.py:Mine"), ("b", "gpg"))
    }
    own = {name: [title for title in some if title.startswith("Own")] for name, some in titles.items()}
    assert own == {"my_loss.py:Mine": ["Own metric mine/spread"], "gpg": []}
    assert "Reward component x.py:f" in titles["gpg"], "a function of weight 0 is drawn, too"


def test_metrics_that_are_not_an_own_losss_have_no_panel():
    lines = (Path(__file__).parent / "recorded_cluster_run.jsonl").read_text().splitlines()
    rows = {row["step"]: row for row in map(json.loads, lines)}
    run = RunLog(Path("recorded"), rows, {"loss_fn.variant": "my_loss.py:Mine"})
    titles = [panel.title for panel in panels_of([RunGroup("recorded", (run,))])]
    assert not [title for title in titles if title.startswith("Own")]


def test_one_run_shows_the_same_held_out_problems_at_each_validation(make_run, tmp_path):
    run = make_run("a", accuracy(0.1, 0.2))
    row = {
        "validation": "amc",
        "problem": "p7",
        "prompt": "1 <+> 1?",
        "answer": "2",
        "scores": {"accuracy": 0},
    }
    samples = [{"step": 3, "problem": "p1", "response": "rolled out"}]
    samples += [row | {"step": step, "response": f"greedy {step}"} for step in range(0, 100, 10)]
    samples.append(row | {"step": 90, "response": "x" * 2001, "scores": {"accuracy": 1.0}})  # resumed
    (run / "samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in samples))
    page = plot_run(run).read_text()
    assert page.count("<summary>amc: p7, right answer 2</summary>") == 1
    assert "1 &lt;+&gt; 1?" in page
    assert "rolled out" not in page
    rows = re.findall("<tr><td>(.+?)</td><td>(.+?)</td><td>(.+?)</td></tr>", page.split("samples>")[1])
    assert [int(step) for step, *_ in rows] == [0, 10, 30, 40, 50, 60, 80, 90], "the ends and six between"
    assert rows[0] == ("0", "0", "greedy 0")
    assert rows[-1] == ("90", "1", "x" * 2000 + " ... (2001 letters)")
    assert (
        "samples>"
        not in write_report([run, make_run("b", accuracy(0.1), "gpg")], tmp_path / "b.html").read_text()
    )


def test_two_runs_of_one_seed_are_no_seeds(make_run, tmp_path):
    folders = [make_run(name, accuracy(0.5), seed=seed) for name, seed in (("a", 0), ("b", 1), ("c", 0))]
    with pytest.raises(UserError, match=r"/a and .*/c have .* grpo\.seed=0; leave one out"):
        write_report(folders, tmp_path / "r.html")


def test_a_run_without_a_first_validation_has_no_start(make_run, tmp_path):
    page = write_report([make_run("a", accuracy(0.1, 0.5)[1:])], tmp_path / "out.html").read_text()
    head, row = cells(page)
    assert head == ["setting", "seed numbers", "steps", "best", "final"]
    assert row == ["grpo", "0", "10", "0.500", "0.500"]


def test_folder_of_a_comparison_stands_for_its_runs(make_run, tmp_path):
    (tmp_path / "runs").mkdir()
    for seed in (0, 1):
        make_run(f"runs/grpo-s{seed}", accuracy(0.5), seed=seed)
    make_run("runs/just-started", [])
    run = tmp_path / "runs" / "grpo-s0"
    page = write_report([tmp_path, run, run / ".." / "grpo-s0"], tmp_path / "out.html").read_text()
    assert cells(page)[1][:2] == ["grpo", "0, 1"]  # each counts once


def test_unwritable_output_is_refused(make_run, tmp_path):
    folder = make_run("a", accuracy(0.5))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        write_report([folder], tmp_path / "file" / "report.html")


def test_report_without_a_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="no run"):
        write_report([], tmp_path / "report.html")


def test_only_reports_are_replaced(make_run, tmp_path):
    folder, data = make_run("a", [{"step": 1}]), tmp_path / "ok.jsonl"
    data.write_text('{"answer": 1}\n')
    with pytest.raises(UserError, match=r"ok\.jsonl exists and is not a report; remove it, or"):
        write_report([folder], data)
    assert data.read_text() == '{"answer": 1}\n'
    assert not (tmp_path / "plots").exists()
    page = write_report([folder], tmp_path / "report.html").read_text()
    assert write_report([folder], tmp_path / "report.html").read_text() == page


def test_cli_writes_the_report_where_told(make_run, tmp_path):
    out = tmp_path / "out" / "r.html"
    result = CliRunner().invoke(app, ["report", str(make_run("a", accuracy(0.5))), "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert out.is_file()
    assert str(out) in result.output.replace("\n", "")


def test_panel_takes_the_metric_that_every_group_has(make_run):
    both = make_run("both", [{"step": 1, "a": 1.0, "b": 1.0}], "gpg")
    one = make_run("one", [{"step": 1, "b": 1.0}], "erpo")
    none = make_run("none", [{"step": 1}])
    read = [read_run(folder) for folder in (both, one, none)]
    chosen = [common_key(group_runs(runs), ("a", "b")) for runs in (read[:1], read[:2], read, read[2:])]
    assert chosen == ["a", "b", "a", "a"]


def test_running_mean_is_centred_and_keeps_length():
    values = np.arange(60.0)
    smooth = running_mean(values)  # 60 values: two on either side
    assert smooth[30] == 30
    assert smooth[0] == 1  # mean of 0, 1, 2
    assert smooth[-1] == 58
    assert len(smooth) == 60
    assert running_mean(np.array([3.0, 5.0])).tolist() == [3, 5]


def test_a_share_has_no_axis_below_zero_and_no_title_touches_the_metrics_name(make_run):
    names = ("validation/accuracy", "reward/accuracy", "rollout/all_wrong", "covariance/p1", "covariance/p50")
    rows = [{"step": step, **dict.fromkeys(names, 0.01 * step)} for step in range(5)]
    groups = group_runs([read_run(make_run("a", rows))])
    for panel in (panel for panel in panels_of(groups) if panel.is_filled(groups)):
        figure = new_figure(4.1, 2.9)  # as in the overview
        axes = figure.add_subplot()
        plots._fill(axes, panel, groups)
        renderer = FigureCanvasAgg(figure).get_renderer()
        figure.draw(renderer)
        (metric,) = axes.texts
        title = axes._left_title.get_window_extent(renderer)
        assert not metric.get_window_extent(renderer).overlaps(title), panel.name
        assert panel.name == "covariance" or axes.get_ylim()[0] == 0, panel.name


@pytest.mark.parametrize(
    ("steps", "ticks"),
    [
        (range(161), [0, 30, 60, 90, 120, 160]),  # 150 is too near
        (range(1, 2), [1]),
        ([1, 2, 3], [1, 2, 3]),
    ],
)
def test_the_last_step_has_a_tick_that_touches_no_other(steps, ticks):
    axes = new_figure(4.4, 3.2).add_subplot()
    axes.plot(steps, steps)
    axes.margins(x=0.02)
    assert plots.step_ticks(axes) == ticks
