"""A job's time limit against the plan's step."""

from datetime import timedelta

import pytest

from nemo_grpo.launch.plan_summary import kind_of, time_verdict
from nemo_grpo.plan.planner import plan_recipe
from nemo_grpo.recipe import load_recipe

SMALL = "tr_grpo/tr_grpo-qwen2.5-3b-instruct-logic-1n8g"
SHORT = ["grpo.num_prompts_per_step=8", "policy.train_global_batch_size=64"]
SHORT += ["policy.generation.max_new_tokens=256"]
LARGE = "gpg/gpg-qwen2.5-32b-4n8g"


def test_time_without_a_start_a_step_and_a_checkpoint_is_refused():
    recipe = load_recipe(LARGE)
    found = plan_recipe(recipe).forecast
    step, save = found.step.seconds, found.step.checkpoint

    def verdict(seconds, signal="B:USR1@1"):
        return time_verdict(recipe, "h100", timedelta(seconds=seconds), signal)

    least = 85 + step / (1 + found.error.worst) + save
    assert not verdict(least - 1)[0]
    assert verdict(least + 1)[0]
    assert "about 10 of 1100 steps" in verdict(85 + 10 * step + save + 1)[1]
    assert "about 9 of 1100 steps" in verdict(85 + 10 * step + save - 1)[1]


@pytest.mark.parametrize(("signal", "lead"), [(None, 300), ("B:USR1@3000", 3000), ("B:USR1", 60)])
def test_steps_begin_before_the_signal_to_stop(signal, lead):
    """The job scripts' own signal comes 300 s before the limit, one of sbatch without a time 60 s."""
    recipe = load_recipe(SMALL, SHORT)
    found = plan_recipe(recipe).forecast
    step = found.step.seconds
    assert found.step.checkpoint + step < 60 <= lead
    assert not time_verdict(recipe, "h100", timedelta(seconds=85 + lead), signal)[0]
    accepted, said = time_verdict(recipe, "h100", timedelta(seconds=85 + lead + 4.5 * step), signal)
    assert accepted
    assert "about 5 of " in said
    assert f"{lead} s before the limit" in said


def test_embedded_recipes_are_not_compared_with_steps():
    recipe = load_recipe("quickstart")
    assert time_verdict(recipe, "h100", timedelta(minutes=6))[0]
    assert not time_verdict(recipe, "h100", timedelta(minutes=5))[0]
    assert time_verdict(recipe, "h100", timedelta(minutes=1), "B:USR1@30")[0]


def test_gpus_are_known_by_their_longest_name():
    kinds = {"NVIDIA GB200": "gb200", "NVIDIA B200": "b200", "NVIDIA H200": "h200"}
    kinds |= {"NVIDIA A100-SXM4-80GB": "a100", "NVIDIA A100-SXM4-40GB": None, "NVIDIA A30": None}
    assert {name: kind_of(name) for name in kinds} == kinds
