"""Differences to a baseline: intervals against printed tables and numbers worked out by hand."""

import pytest

from nemo_grpo.report import paired as module
from nemo_grpo.report.paired import (
    Difference,
    compare_groups,
    paired_records,
    paired_table,
    sentences,
    t_quantile,
)
from nemo_grpo.report.runs import RunGroup, RunLog


def invented_run(tmp_path, seed, accuracies, prompts=4, label="x"):
    """Validated at steps 0, 10, 20, ...; every step draws ``prompts`` prompts of 2 responses, 100 tokens."""
    rows = {
        step: {"step": step, "rollout/num_prompts": prompts, "tokens/trained": 100 * step}
        for step in range(1, 10 * len(accuracies) - 9)
    }
    rows[0] = {"step": 0}
    for number, value in enumerate(accuracies):
        rows[10 * number] |= {"validation/accuracy": value, "validation/pass@8": value + 0.1}
    settings = {"grpo.seed": seed, "grpo.num_generations_per_prompt": 2}
    return RunLog(tmp_path / f"{label}-s{seed}", dict(sorted(rows.items())), settings)


def group(tmp_path, label, curves, prompts=4):
    runs = (invented_run(tmp_path, seed, curve, prompts, label) for seed, curve in curves.items())
    return RunGroup(label, tuple(runs))


def difference(*values):
    return Difference({str(seed): value for seed, value in enumerate(values)})


@pytest.mark.parametrize(("df", "printed"), [(1, 12.706), (2, 4.303), (4, 2.776), (5, 2.571), (120, 1.98)])
def test_t_quantile_is_that_of_the_printed_tables(df, printed):
    assert t_quantile(df) == pytest.approx(printed, abs=5e-4)


def test_interval_is_the_paired_t_interval():
    # Mean 0.2, s = sqrt(0.02 / 3) = 0.081650, t(3) = 3.18245: half = 3.18245 * 0.081650 / 2 = 0.129923.
    found = difference(0.1, 0.2, 0.3, 0.2)
    assert found.mean == pytest.approx(0.2)
    assert found.interval == pytest.approx((0.070077, 0.329923), abs=1e-6)
    assert found.cell() == "+0.200 [+0.070, +0.330]"


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ((0.1, 0.2, 0.3, 0.2), "better at 4 seeds"),
        ((-0.1, -0.2, -0.3, -0.2), "worse at 4 seeds"),
        ((0.1, 0.2, 0.3), "cannot tell at 3 seeds"),  # half = 4.303 * 0.1 / sqrt(3) = 0.248 > 0.2
        ((0.9,), "cannot tell at 1 seed"),
        ((0.35 - 0.3, 0.25 - 0.2), "cannot tell at 2 seeds"),  # equal but for rounding
    ],
)
def test_verdict_follows_the_interval(values, verdict):
    assert difference(*values).verdict == verdict


def test_pairs_are_of_equal_seeds_and_remove_what_seeds_share(tmp_path):
    # Seeds differ by 0.5, settings by 0.04 +- 0.01: unpaired nothing shows.
    base = group(tmp_path, "grpo", {0: [0.1, 0.2], 1: [0.1, 0.7], 2: [0.1, 0.4], 3: [0.1, 0.9]})
    other = group(tmp_path, "gpg", {2: [0.1, 0.45], 1: [0.1, 0.74], 0: [0.1, 0.23], 7: [0.1, 0.0]})
    (found,) = compare_groups([other, base], "grpo")
    assert found.label == "gpg"
    final = found.differences["final"]
    assert final.by_seed == pytest.approx({"0": 0.03, "1": 0.04, "2": 0.05})
    # s = 0.01, half = 4.30265 * 0.01 / sqrt(3) = 0.024841
    assert final.interval == pytest.approx((0.015159, 0.064841), abs=1e-6)
    assert found.differences["pass@8"].mean == pytest.approx(0.04)
    assert found.differences["tokens trained"].mean == 0
    record = paired_records([found], "grpo")
    assert (record["baseline"], record["settings"]["gpg"]["final"]["mean"]) == ("grpo", final.mean)
    assert sentences([found], "grpo") == [
        "gpg against grpo: better at 3 seeds by accuracy after the same steps, +0.040 [+0.015, +0.065]; "
        "better at 3 seeds by accuracy after the same rollouts, +0.040 [+0.015, +0.065]."
    ]


def test_verdict_is_turned_round_where_lower_is_better(tmp_path):
    base = group(tmp_path, "grpo", {0: [0.9, 0.5], 1: [0.9, 0.6], 2: [0.9, 0.7]})
    lower = group(tmp_path, "gpg", {0: [0.4, 0.2], 1: [0.4, 0.31], 2: [0.4, 0.42]})
    for one in (base, lower):
        for run in one.runs:
            run.settings["checkpointing.metric_name"] = "val:cost"
            run.settings["checkpointing.higher_is_better"] = False
            for row in run.rows.values():
                if "validation/accuracy" in row:
                    row["validation/cost"] = row["validation/accuracy"]
    (found,) = compare_groups([base, lower], "grpo")
    assert found.differences["best"].by_seed == pytest.approx({"0": -0.3, "1": -0.29, "2": -0.3})
    assert sentences([found], "grpo")[0].startswith("gpg against grpo: better at 3 seeds by cost after")
    assert not found.differences["final, same rollouts"].higher_is_better
    assert found.differences["pass@8"].higher_is_better
    (turned,) = compare_groups([base, lower], "gpg")
    assert turned.differences["final"].verdict == "worse at 3 seeds"


def test_best_and_final_stop_at_the_last_common_validation(tmp_path):
    base = group(tmp_path, "grpo", {0: [0.1, 0.5, 0.3]})
    longer = group(tmp_path, "gpg", {0: [0.1, 0.2, 0.4, 0.9]})
    (found,) = compare_groups([base, longer], "grpo")
    assert found.differences["final"].mean == pytest.approx(0.4 - 0.3)
    assert found.differences["best"].mean == pytest.approx(0.4 - 0.5)


def test_same_rollouts_takes_the_run_that_draws_more_where_the_other_ends(tmp_path):
    # 20 steps of 4 x 2 are 160 responses; at 16 x 2 per step those are drawn after step 5, halfway to 0.3.
    base = group(tmp_path, "grpo", {0: [0.1, 0.2, 0.35]})
    drawing = group(tmp_path, "gpg", {0: [0.1, 0.3, 0.5]}, prompts=16)
    for first, second, sign in ((base, drawing, 1), (drawing, base, -1)):
        (found,) = compare_groups([first, second], first.label)
        assert found.differences["final, same rollouts"].mean == pytest.approx(sign * (0.2 - 0.35))
        assert found.differences["final"].mean == pytest.approx(sign * 0.15)


def test_runs_without_counts_or_a_common_validation_have_no_value_at_the_same_rollouts(tmp_path):
    # Both validated at step 10 alone: 80 responses are drawn by one, 320 by the other.
    base, drawing = (group(tmp_path, f"{n}", {0: [0.1, 0.2]}, prompts=n) for n in (4, 16))
    for one in (base, drawing):
        del one.runs[0].rows[0]["validation/accuracy"]
    for first, second in ((base, drawing), (drawing, base)):
        (found,) = compare_groups([first, second], first.label)
        assert found.differences.keys() == {"final", "best", "pass@8", "tokens trained"}
    base, other = (group(tmp_path, name, {0: [0.1, 0.2]}) for name in ("grpo", "gpg"))
    for row in other.runs[0].rows.values():
        row.pop("rollout/num_prompts", None)
    head, rows = paired_table(compare_groups([base, other], "grpo"), "grpo")
    assert head == ["minus grpo", "final", "best", "pass@8", "tokens trained"]
    assert rows == [["gpg", "+0.000", "+0.000", "+0.000", "+0"]]


def test_nothing_is_compared_without_a_finished_baseline_or_a_common_seed(tmp_path):
    other = group(tmp_path, "gpg", {0: [0.1, 0.2]})
    assert compare_groups([other], "grpo") == []
    (found,) = compare_groups([group(tmp_path, "grpo", {1: [0.1, 0.2]}), other], "grpo")
    assert found.differences == {}
    assert sentences([found], "grpo") == [
        "gpg against grpo: cannot tell, no seed in common with a validation."
    ]


def test_forest_draws_intervals_at_their_ends_and_fills_those_without_0(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(module, "write_png", lambda figure, path, dpi: drawn.append(figure))
    base = group(tmp_path, "grpo", {s: [0.1, 0.2] for s in range(4)})
    sure = group(tmp_path, "sure", dict(enumerate([[0.1, 0.3], [0.1, 0.4], [0.1, 0.5], [0.1, 0.4]])))
    unsure = group(tmp_path, "unsure", {0: [0.1, 0.1], 1: [0.1, 0.9]})
    module.draw_forest(compare_groups([base, sure, unsure], "grpo"), "grpo", tmp_path / "x.png")
    (axes,) = drawn[0].axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["sure (n=4)", "unsure (n=2)"]
    line, mark = axes.lines[1], axes.lines[2]  # after the line at 0
    assert line.get_xdata() == pytest.approx([0.070077, 0.329923], abs=1e-6)
    assert mark.get_markerfacecolor() != "white"
    assert axes.lines[4].get_markerfacecolor() == "white"
