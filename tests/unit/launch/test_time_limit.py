"""A job's time limit against the plan's step."""

from datetime import timedelta
from pathlib import Path

from nemo_grpo.launch.verdicts import kind_of, time_verdict
from nemo_grpo.plan import plan_recipe
from nemo_grpo.recipe import load_recipe

RECIPES = Path(__file__).parents[3] / "recipes"
LARGE = RECIPES / "gpg" / "gpg-qwen2.5-32b-4n8g.yaml"


def test_time_without_a_step_and_a_checkpoint_is_refused() -> None:
    recipe = load_recipe(LARGE)
    found = plan_recipe(recipe).forecast
    assert found is not None
    least = found.step.seconds / (1 + found.seen.worst) + found.step.checkpoint
    assert not time_verdict(recipe, "h100", timedelta(seconds=least - 1))[0]
    assert time_verdict(recipe, "h100", timedelta(seconds=least + 1))[0]
    ten = timedelta(seconds=10 * found.step.seconds + found.step.checkpoint + 1)
    assert "about 10 of 1100 steps" in time_verdict(recipe, "h100", ten)[1]


def test_embedded_recipes_are_not_compared() -> None:
    assert time_verdict(load_recipe(RECIPES / "quickstart.yaml"), "h100", timedelta(minutes=1))[0]


def test_gpus_are_known_by_their_longest_name() -> None:
    assert kind_of("NVIDIA GB200") == "gb200"
    assert kind_of("NVIDIA B200") == "b200"
    assert kind_of("NVIDIA H200") == "h200"
    assert kind_of("NVIDIA A100-SXM4-80GB") == "a100"
    assert kind_of("NVIDIA A100-SXM4-40GB") is None
    assert kind_of("NVIDIA A30") is None
