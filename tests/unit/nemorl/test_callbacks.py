"""Callbacks on NeMo-RL's logger: what is recorded, added and warned of; the logger alone is needed."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace as Of

import pytest
import torch

from nemo_grpo.nemorl.added_metrics import (
    BF16_BOUND,
    EXCEEDS,
    DrawnRollouts,
    RolloutCheck,
    ValidationSets,
    bound,
)
from nemo_grpo.nemorl.callbacks import Callback, RunRecord, calling_back, locked_run_folders, name_of
from nemo_grpo.nemorl.exit_status import LAST_PREFIX, Ending
from nemo_grpo.nemorl.rewards import RewardMetrics, RolloutRewards, ValidationRewards
from nemo_grpo.recipe import load_recipe
from nemo_grpo.report.runs import read_run
from nemo_grpo.run.signals import StopRequest
from nemo_grpo.support.errors import UserError
from nemo_grpo.tasks import Problem
from nemo_grpo.tasks.base import NOT_FINITE, VALIDATION_SET

RECIPE = "cluster-quickstart"


class Logger:
    """Keeps what reaches it: (metrics, step, prefix, further arguments by name)."""

    def __init__(self):
        self.calls = []

    def log_metrics(self, metrics, step, prefix="", **named):
        self.calls.append((dict(metrics), step, prefix, named))


def test_callbacks_hear_what_others_add_until_the_block_ends():
    logger, heard = Logger(), []
    plain = logger.log_metrics

    class Hears(Callback):
        def on_metrics(self, metrics, step, prefix):
            heard.append((dict(metrics), step, prefix))

    class Adds(Callback):
        def added_metrics(self, metrics, step, prefix):
            return {"twice": 2 * metrics["x"]}

    with calling_back([Hears(), Adds()], logger):
        logger.log_metrics({"x": 1}, step=4, prefix="train")
        logger.log_metrics({"x": 2}, 5, None)
    logger.log_metrics({"x": 3}, 6)
    assert heard == [({"x": 1, "twice": 2}, 4, "train"), ({"x": 2, "twice": 4}, 5, "")]
    assert [metrics for metrics, *_ in logger.calls] == [{"x": 1, "twice": 2}, {"x": 2, "twice": 4}, {"x": 3}]
    assert logger.log_metrics == plain


def test_validation_sets_are_told_apart_by_the_order_of_their_problems(tmp_path):
    """a: p0 and p2, b: p1; two responses to each of the first validation's problems, then NeMo-RL's one."""
    rewards = {5: [1, 0, 1, 1, 0, 0], 6: [1.0, 0.0, 0.0]}
    for step, some in rewards.items():
        lines = (json.dumps({"content": [["p", "r"]], "rewards": [reward]}) + "\n" for reward in some)
        (tmp_path / f"val_data_step{step}.jsonl").write_text("".join(lines))
    logger, theirs = Logger(), {"accuracy": 0.5, "avg_length": 7.0, "pass_k": 1.0}
    with calling_back([ValidationSets(["a", "b", "a"], tmp_path, 2)], logger):
        logger.log_metrics(theirs, 5, prefix="validation")
        logger.log_metrics({"accuracy": 0.3}, 6, prefix="validation")
        logger.log_metrics({"accuracy": 0.5}, 6, prefix="train")
        logger.log_metrics({"payload": 0.5}, 6, prefix="validation")
    for names in ([], ["", ""], ["a", "a"]):
        with calling_back([ValidationSets(names, tmp_path, 1)], single := Logger()):
            single.log_metrics({"accuracy": 0.3}, 6, prefix="validation")
        assert single.calls[0][0] == {"accuracy": 0.3}, "a single set changes nothing"
    of_sets = {"a/accuracy": 0.25, "a/pass_k": 0.5, "b/accuracy": 1.0, "b/pass_k": 1.0}
    assert theirs == {"accuracy": 0.625, "pass_k": 0.75, "avg_length": 7.0} | of_sets, "it ranks checkpoints"
    assert [metrics for metrics, *_ in logger.calls][1:] == [
        {"accuracy": 0.25, "a/accuracy": 0.5, "b/accuracy": 0.0}, {"accuracy": 0.5}, {"payload": 0.5},
    ]  # fmt: skip


def ending(metric=None, threshold=None):
    overrides = [f"grpo.stop_at_validation_metric={metric}", f"grpo.stop_at_validation_threshold={threshold}"]
    return Ending(StopRequest(), load_recipe(RECIPE, overrides if metric else []).grpo)


def test_the_last_step_is_known_without_a_checkpoint():
    logger, end = Logger(), ending()
    with calling_back([end], logger):
        for step, last in ((1, LAST_PREFIX), (2, LAST_PREFIX), (3, "validation")):
            logger.log_metrics({"loss": 1.0}, step, prefix="train")
            logger.log_metrics({"seconds": 1.0}, step, prefix=last)
    assert end.last_step == 2, "the third was not logged to its end"
    assert not end.reached_threshold


def test_a_goal_is_reached_by_the_validation_alone():
    logger, end = Logger(), ending("validation/accuracy", 0.5)
    with calling_back([end], logger):
        for value, prefix, reached in ((0.4, "validation", False), (0.9, "train", False),
                                       (0.5, "validation", True), (0.1, "validation", True)):  # fmt: skip
            logger.log_metrics({"accuracy": value}, 1, prefix=prefix)
            assert end.reached_threshold == reached


@pytest.fixture
def recipe(tmp_path):
    return load_recipe(RECIPE, [f"nemo_grpo.runs_dir={tmp_path}", "grpo.seed=3"])


def rows(recipe):
    return [json.loads(line) for line in (recipe.run_dir / "metrics.jsonl").read_text().splitlines()]


def test_metrics_get_the_embedded_engines_names_where_it_has_them():
    names = {
        ("train", "gen_kl_error"): "mismatch/kl",
        ("timing/train", "total_step_time"): "time/step",
        ("train", "covariance/p1"): "covariance/p1",  # from the variant's estimator
        ("train", "approx_entropy"): "train/approx_entropy",  # not the embedded entropy/mean
        ("", "x"): "x",
    }
    assert {given: name_of(*given) for given in names} == names


def test_every_call_is_a_row_of_a_run_and_still_reaches_nemo_rl(recipe):
    logger = Logger()
    with calling_back([RunRecord(recipe)], logger):
        logger.log_metrics({"accuracy": 0.25}, 0, prefix="validation")
        logger.log_metrics(
            {"reward": torch.tensor(0.5), "texts": ["a"], "lr": 1}, 1, "train", step_metric="s"
        )
    (recipe.checkpoint_dir / "step_1").mkdir(parents=True)
    with calling_back([RunRecord(recipe)], logger):  # resumed
        logger.log_metrics({"loss": 0.5}, 2, "train")
    assert rows(recipe) == [
        {"step": 0, "validation/accuracy": 0.25},
        {"step": 1, "reward/mean": 0.5, "lr": 1.0},
        {"step": 2, "loss/total": 0.5},
    ]
    run = read_run(recipe.run_dir)
    assert (run.engine, run.variant, run.seed) == ("NeMo-RL", "grpo", "3")
    assert (run.points("reward/mean"), run.points("validation/accuracy")) == ({1: 0.5}, {0: 0.25})
    assert logger.calls[0] == ({"accuracy": 0.25}, 0, "validation", {})
    assert logger.calls[1][1:] == (1, "train", {"step_metric": "s"})
    assert logger.calls[1][0]["texts"] == ["a"]


def test_rows_of_steps_that_are_trained_again_are_dropped(recipe):
    """Steps 1 to 13 are logged, the newest checkpoint is step 10's; the job that resumes logs 11 and 12."""
    logger = Logger()
    with calling_back([RunRecord(recipe)], logger):
        for step in range(1, 14):
            logger.log_metrics({"reward": step / 10}, step, "train")
        logger.log_metrics({"accuracy": 0.77}, 13, "validation")
    (recipe.checkpoint_dir / "step_10").mkdir(parents=True)
    with calling_back([RunRecord(recipe)], logger):
        for step in (11, 12):
            logger.log_metrics({"reward": 0.0}, step, "train")
    run = read_run(recipe.run_dir)
    assert list(run.points("reward/mean")) == list(range(1, 13))
    assert [run.points("reward/mean")[step] for step in (10, 11, 12)] == [1.0, 0.0, 0.0]
    assert run.points("validation/accuracy") == {}, "of a policy that no longer exists"


def test_rows_of_a_run_without_a_checkpoint_are_moved_aside(recipe):
    for reward in (0.5, 0.25):
        with calling_back([RunRecord(recipe)], logger := Logger()):
            logger.log_metrics({"reward": reward}, 1, "train")
    assert rows(recipe) == [{"step": 1, "reward/mean": 0.25}]
    old = (recipe.run_dir / "metrics.old.jsonl").read_text()
    assert json.loads(old) == {"step": 1, "reward/mean": 0.5}


def test_rows_have_null_for_what_json_cannot_express(recipe):
    with calling_back([RunRecord(recipe)], logger := Logger()):
        logger.log_metrics({"reward": float("nan"), "loss": 1.0}, 1, "train")
    assert rows(recipe) == [{"step": 1, "reward/mean": None, "loss/total": 1.0}]


def test_a_full_disk_ends_the_run(recipe):
    record, logger = RunRecord(recipe), Logger()
    with calling_back([record], logger):
        record.run.metrics = Path("/dev/full")
        with pytest.raises(OSError, match="No space left"):
            logger.log_metrics({"loss": 1.0}, 2, "train")


HOLDER = """
import sys
from nemo_grpo.nemorl.callbacks import locked_run_folders
from nemo_grpo.recipe import load_recipe

with locked_run_folders(load_recipe(sys.argv[1], sys.argv[2:])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_folder_in_use_is_refused_until_the_run_that_uses_it_is_dead(tmp_path):
    shared = [f"checkpointing.checkpoint_dir={tmp_path}/shared", f"nemo_grpo.runs_dir={tmp_path}"]
    other = load_recipe(RECIPE, [*shared, "nemo_grpo.run_name=two"])
    command = [sys.executable, "-c", HOLDER, RECIPE, *shared]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "locked\n"
        with pytest.raises(UserError, match="shared is in use by another run"), locked_run_folders(other):
            pass
        first.kill()
    with locked_run_folders(other), locked_run_folders(other):
        assert (tmp_path / "shared" / ".lock").exists()


def settings_of(fp8=False, ahead=0):
    return Of(uses_fp8=fp8, rollouts_ahead=ahead)


def logged(settings, error):
    logger = Logger()
    with calling_back([RolloutCheck(settings)], logger):
        logger.log_metrics({"gen_kl_error": error, "loss": 1.0}, 7, prefix="train", step_finished=True)
    [(metrics, *where)] = logger.calls
    assert where == [7, "train", {"step_finished": True}]
    assert metrics.pop("loss") == 1.0
    return metrics


# 0.0456: stale weights, measured with two data-parallel ranks; 1.9e-5: the same run with fresh ones
@pytest.mark.parametrize(
    ("settings", "error", "exceeds"),
    [
        ({}, 0.0456, 1.0),
        ({}, 0.0101, 1.0),
        ({}, 0.0099, 0.0),
        ({}, float("nan"), 1.0),
        ({"fp8": True}, 0.029, 0.0),
        ({"ahead": 1, "fp8": True}, 0.0476, 0.0),  # 0.03 + 1.2 - 1 - ln(1.2) = 0.04768
        ({"ahead": 1, "fp8": True}, 0.0478, 1.0),
        ({"ahead": 4}, 0.354, 0.0),  # 0.01 + 1.2^4 - 1 - 4 ln(1.2) = 0.35431
        ({"ahead": 4}, 0.355, 1.0),
    ],
)
def test_error_above_the_bound_is_warned_of_and_logged(settings, error, exceeds, caplog):
    metrics = logged(settings_of(**settings), error)
    assert metrics[EXCEEDS] == exceeds
    assert (metrics["gen_kl_error"] == error) or error != error
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == exceeds
    assert all("step 7: gen_kl_error" in text and "overlap_param_gather" in text for text in messages)


def test_rollouts_are_older_by_no_more_than_the_steps_that_there_were():
    bounds = [bound(settings_of(ahead=3), step) for step in (1, 2, 3, 4, 5)]
    assert bounds[0] == bound(settings_of(), 1) == BF16_BOUND
    assert bounds[1:3] == [bound(settings_of(ahead=ahead), 9) for ahead in (1, 2)]
    assert bounds[3] == bounds[4] == pytest.approx(0.01 + 1.728 - 1 - 3 * 0.1823216, abs=1e-6)


@pytest.mark.parametrize("ahead", [0, 1])
def test_step_whose_every_response_is_empty_is_warned_of(ahead, caplog):
    """NeMo-RL's asynchronous rollouts go on when vLLM refuses every request."""
    with calling_back([RolloutCheck(settings_of(ahead=ahead))], logger := Logger()):
        for step, length in ((3, 0.5), (4, 0.0)):
            metrics = {"gen_kl_error": 0.0, "mean_gen_tokens_per_sample": length}
            logger.log_metrics(metrics, step, prefix="train")
    [message] = [record.getMessage() for record in caplog.records]
    assert message.startswith("step 4: no response has a token")
    assert "'Error generating response'" in message


def test_a_mean_with_responses_without_a_reward_is_that_of_the_others(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", Of(get=lambda found: []))
    logger = Logger()
    with calling_back([RewardMetrics([])], logger):
        logger.log_metrics({"reward": float("nan"), "reward/mean": 0.5}, 1, prefix="train")
        logger.log_metrics({"reward": 0.25, "reward/mean": 0.25}, 2, prefix="train")
    assert [metrics["reward"] for metrics, *_ in logger.calls] == [0.5, 0.25]


def test_under_dynamic_sampling_rollout_metrics_are_of_all_draws(monkeypatch, recipe):
    """Two draws of 10 and 20 tokens, then a step without dynamic sampling."""
    monkeypatch.setitem(sys.modules, "ray", Of(get=lambda found: []))
    logger, nan = Logger(), float("nan")
    with calling_back([DrawnRollouts(), RewardMetrics([]), RunRecord(recipe)], logger):
        for length, rate, most in ((10.0, 0.0, 40), (20.0, 0.5, 30)):
            draw = {"mean_gen_tokens_per_sample": length, "truncation_rate": rate}
            draw |= {"max_gen_tokens_per_sample": most}
            logger.log_metrics(draw, 1, prefix="train")
        rewards = {"reward": nan, "filtered_reward": nan, "kept/reward/mean": 0.5, "reward/mean": 0.75}
        logger.log_metrics({"loss": 0.0} | rewards | {"kept/length/mean": 18.0} | draw, 1, prefix="train")
        logger.log_metrics(draw, 2, prefix="train")
        logger.log_metrics({"loss": 0.0, "reward": 0.25} | draw, 2, prefix="train")
    first, second = (rows(recipe)[index] for index in (2, 4))
    shown = ("reward/mean", "kept/reward/mean", "length/mean", "kept/length/mean", "train/truncation_rate")
    assert [first[name] for name in shown] == [0.75, 0.5, 15.0, 18.0, 0.25]
    assert first["train/max_gen_tokens_per_sample"] == 40
    assert (second["reward/mean"], second["length/mean"]) == (0.25, 20.0)


def scores(accuracy, form=1.0):
    return {"accuracy": accuracy, "format": form}


def problem_of(name, validation_set=None):
    return Problem(name, "?", "1", {} if validation_set is None else {VALIDATION_SET: validation_set})


def test_a_validation_has_the_recipes_reward_and_components_by_set(monkeypatch):
    """a: rewards 1 + 0.5 x 2 and 0 + 0.5 x 4, b: 1 + 0.5 x 3; the first response of a is in its last turn."""
    held_out = ValidationRewards({"accuracy": 1.0, "my.py:f": 0.5})
    first = held_out.note(problem_of("p0", "a"), scores(0) | {"my.py:f": 9.0})
    held_out.note(problem_of("p1", "a"), scores(0, 0.0) | {"my.py:f": 4.0})
    held_out.note(problem_of("p0", "a"), scores(1) | {"my.py:f": 2.0}, first)
    held_out.note(problem_of("p2", "b"), scores(1) | {"my.py:f": 3.0})
    actor = Of(take_rewards=Of(remote=held_out.take))
    monkeypatch.setitem(sys.modules, "ray", Of(get=lambda found: found))
    logger, theirs = Logger(), {"accuracy": 0.75}
    with calling_back([RewardMetrics([{}, {"task": actor}])], logger):
        logger.log_metrics({"generation_time": 1.0}, 4, prefix="validation")
        logger.log_metrics({"reward": 0.5}, 5, prefix="train")
        logger.log_metrics(theirs, 5, prefix="validation")
    assert theirs == {
        "accuracy": 0.75, "reward": 2.25, "format": 0.75, "my.py:f": 3.0,
        "a/reward": 2.0, "a/format": 0.5, "a/my.py:f": 3.0,
        "b/reward": 2.5, "b/format": 1.0, "b/my.py:f": 3.0,
    }, "it ranks checkpoints"  # fmt: skip
    assert held_out.take() == {}


def test_shares_and_means_of_all_groups_also_of_a_problem_drawn_twice():
    drawn = RolloutRewards(2)
    for problem, accuracies in (("a", (1, 1)), ("a", (0, 0)), ("c", (0, 1)), ("d", (0, 0))):
        for accuracy in accuracies:
            drawn.note(problem_of(problem), scores(accuracy, 0.5))
    drawn.scores["c"][5] |= {NOT_FINITE: 1.0}
    assert drawn.take() == {
        "rollout/all_right": 0.25,
        "rollout/all_wrong": 0.5,
        "reward/accuracy": 0.375,
        "reward/format": 0.5,
        f"reward/{NOT_FINITE}": 0.125,
        "reward/abstained": 0.0,
    }
    assert drawn.take() == {}


def test_the_last_turn_of_a_response_counts():
    drawn = RolloutRewards(2)
    first, second = (drawn.note(problem_of("a"), scores(0)) for _ in range(2))
    assert drawn.note(problem_of("a"), scores(1), first) == first
    drawn.note(problem_of("a"), scores(1), second)
    assert drawn.take()["reward/accuracy"] == 1


def test_a_part_of_a_group_waits_for_its_rest():
    drawn = RolloutRewards(3)
    first, *_ = [drawn.note(problem_of("a"), scores(1)) for _ in range(4)]
    assert drawn.take()["reward/accuracy"] == 1
    drawn.note(problem_of("a"), scores(0), first)  # a late turn of a group that was taken
    for _ in range(2):
        drawn.note(problem_of("a"), scores(0))
    assert drawn.take()["reward/accuracy"] == pytest.approx(1 / 3)


def test_a_late_turn_of_a_validation_that_was_taken_is_no_part_of_the_next():
    held_out = ValidationRewards({"accuracy": 1.0})
    first = held_out.note(problem_of("p0", "a"), scores(1))
    assert held_out.take()["reward"] == 1
    held_out.note(problem_of("p0", "a"), scores(0), first)
    assert held_out.take() == {}
