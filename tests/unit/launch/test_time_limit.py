"""A job's time limit against the plan's step."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from nemo_grpo.errors import UserError
from nemo_grpo.launch.plan import kind_of, time_limit, time_verdict
from nemo_grpo.plan import plan_recipe
from nemo_grpo.recipe import load_recipe

RECIPES = Path(__file__).parents[3] / "recipes"
LARGE = RECIPES / "gpg" / "gpg-qwen2.5-32b-4n8g.yaml"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("1:30", 90),
        ("04:00:00", 14400),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("1-00:00:05", 86405),
        ("unlimited", inf),
    ],
)
def test_times_are_read_as_sbatch_reads_them(text: str, seconds: float) -> None:
    assert time_limit(text) == seconds


@pytest.mark.parametrize("text", ["", "4h", "1:2:3:4", "-3", "1-", "1.5"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="not a time; use minutes"):
        time_limit(text)


def test_time_without_a_step_and_a_checkpoint_is_refused() -> None:
    recipe = load_recipe(LARGE)
    found = plan_recipe(recipe).forecast
    assert found is not None
    assert found.error is not None
    least = found.step.seconds / (1 + found.error[1]) + found.step.checkpoint
    assert not time_verdict(recipe, "h100", f"0:{int(least) - 1}")[0]
    assert time_verdict(recipe, "h100", f"0:{int(least) + 1}")[0]
    ten = int(10 * found.step.seconds + found.step.checkpoint) + 1
    assert "about 10 of 1100 steps" in time_verdict(recipe, "h100", f"0:{ten}")[1]


def test_embedded_recipes_are_not_compared() -> None:
    assert time_verdict(load_recipe(RECIPES / "quickstart.yaml"), "h100", "1")[0]


def test_gpus_are_known_by_their_longest_name() -> None:
    assert kind_of("NVIDIA GB200") == "gb200"
    assert kind_of("NVIDIA B200") == "b200"
    assert kind_of("NVIDIA A100") is None
