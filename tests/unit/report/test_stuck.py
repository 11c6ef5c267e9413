"""A run that cannot learn says so: in its log, its report, its comparison."""

import json

import pytest

from nemo_grpo.report.report import write_report
from nemo_grpo.report.stuck import AGAIN_AFTER, NUM_STEPS, Watch, findings

pytestmark = pytest.mark.usefixtures("undrawn")
LEARNS = {
    "groups/valid_fraction": 0.5, "rollout/all_wrong": 0.25, "rollout/all_right": 0.25, "reward/mean": 0.5,
    "length/truncated": 0.1, "length/mean": 100.0, "reward/format": 0.5, "reward/accuracy": 0.5,
    "reward/not_finite": 0.0,
}  # fmt: skip
WRONG = {"groups/valid_fraction": 0.0, "rollout/all_wrong": 1.0, "rollout/all_right": 0.0, "reward/mean": 0.0}
RIGHT = {"groups/valid_fraction": 0.0, "rollout/all_wrong": 0.0, "rollout/all_right": 1.0, "reward/mean": 1.0}
EQUAL = {"groups/valid_fraction": 0.0, "rollout/all_wrong": 0.2, "rollout/all_right": 0.3}
UNREAD = {"reward/format": 0.0, "reward/accuracy": 0.0}


def rows(*changes):
    return [{"step": number, **LEARNS, **change} for number, change in enumerate(changes, 1)]


def test_a_run_that_learns_has_no_findings():
    assert findings(rows(*[{}] * 30)) == []
    assert findings(rows(*[WRONG] * 5, {}, *[WRONG] * 4)) == []  # one step with a signal is enough
    assert findings(rows(*[UNREAD | {"reward/accuracy": 0.5}] * NUM_STEPS)) == []  # right without the form
    assert findings([]) == findings([{"step": 0, "validation/accuracy": 0.0}]) == []


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (WRONG, ("no group do two rewards", "100% of the groups all wrong, mean reward 0", "easier")),
        (RIGHT, ("no group do two rewards", "100% of the groups all right, mean reward 1", "harder")),
        (EQUAL, ("20% of the groups all wrong, 30% of the groups all right", "another reward")),
        ({"length/truncated": 0.99}, ("cut off", "99% of them, mean length 100", "max_new_tokens")),
        (UNREAD, ("has the form", "format 0, accuracy 0", "nemo_grpo.prompt")),
        ({"reward/not_finite": 0.25}, ("counts as 0 (25% of the responses)",)),
    ],
)
def test_what_keeps_a_run_from_learning_is_told_with_numbers_and_a_remedy(change, parts):
    (sentence,) = findings(rows({}, *[change] * NUM_STEPS))
    assert sentence.startswith("steps 2 to 11: ")
    for part in parts:
        assert part in sentence


def test_what_has_no_weight_in_the_reward_is_no_obstacle():
    unread, wrong = rows(*[UNREAD] * NUM_STEPS), rows(*[WRONG] * NUM_STEPS)
    own = {"my_rewards.py:right": 1.0, "accuracy": 0.0, "format": 0.0}
    assert findings(unread, weights=own) == findings(unread, weights={"accuracy": 1.0}) == []
    assert "has the form" in findings(unread, weights={"accuracy": 1.0, "format": 0.1})[0]
    assert "has the form" in findings(unread, weights={"format_signed": 1.0})[0]
    (sentence,) = findings(wrong, weights=own)
    assert "does not tell the responses apart" in sentence
    assert "wrong" not in sentence
    assert Watch(1, own)({"step": 1, **LEARNS, **UNREAD}) == []


def test_a_cluster_runs_own_names_are_read():
    cluster = {"step": 3, "groups/valid_fraction": 0.0} | {
        f"baseline_reward/pct_{n}": 100.0 * (1 - n) for n in (0, 1)
    }
    first, second = findings([cluster | {"train/truncation_rate": 1.0}])
    assert first.startswith("step 3: ")
    assert "100% of the groups all wrong" in first
    assert "100% of them" in second


@pytest.mark.parametrize(
    ("most", "changes", "steps"),
    [
        (1000, [{}] * 5 + [WRONG] * 70, [5 + NUM_STEPS, 5 + NUM_STEPS + AGAIN_AFTER]),
        (1000, [WRONG] * 10 + [{}] + [WRONG] * 10, [10, 21]),  # it had ended
        (3, [WRONG] * 3, [3]),  # a short run is judged by all of its steps
    ],
)
def test_the_log_says_it_once_and_again_after_a_while(most, changes, steps):
    watch = Watch(max_num_steps=most)
    assert [row["step"] for row in rows(*changes) if watch(row)] == steps


def test_the_report_names_the_run(tmp_path):
    for name, change in (("good", {}), ("bad", WRONG)):
        (tmp_path / name).mkdir()
        text = "".join(json.dumps(row) + "\n" for row in rows(*[change] * 12))
        (tmp_path / name / "metrics.jsonl").write_text(text)
    page = write_report([tmp_path / "good", tmp_path / "bad"], tmp_path / "out/report.html").read_text()
    assert "<h2>Does not learn</h2>" in page
    assert "<li>bad: steps 3 to 12: in no group do two rewards differ" in page
    assert "<li>good" not in page
