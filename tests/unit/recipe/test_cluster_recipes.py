"""The shipped recipes for NeMo-RL: they are what their names say, and the planner accepts them on H100."""

import re
from pathlib import Path

import pytest

from nemo_grpo.plan.hardware import HARDWARE
from nemo_grpo.plan.inputs import plan_input, shape_of
from nemo_grpo.plan.rules import problems
from nemo_grpo.recipe import load_recipe

RECIPES = Path(__file__).parents[3] / "recipes"
PAPERS = ("cw_grpo", "erpo", "tr_grpo", "gpg")
CLUSTER = sorted(path for paper in PAPERS for path in (RECIPES / paper).glob("*.yaml"))
NAME = re.compile(r"(?P<variant>[a-z_]+)-(?P<model>.+)-(?P<nodes>\d+)n(?P<gpus>\d+)g(?P<fp8>-fp8)?")
SOURCED = re.compile(r"^\s+(num_prompts|num_gen|max_num_steps|lr|weight_decay|ratio_clip|reference)")


@pytest.mark.parametrize("path", CLUSTER, ids=lambda path: path.stem)
def test_cluster_recipe_is_what_its_name_says_and_fits_its_gpus(path: Path) -> None:
    recipe = load_recipe(path)
    name = NAME.fullmatch(path.stem)
    assert name is not None
    fp8 = recipe.policy.megatron_cfg.fp8_cfg
    assert recipe.nemo_grpo.target == "cluster"
    assert recipe.nemo_grpo.run_name == path.stem
    assert recipe.loss_fn.variant == name["variant"]
    assert (recipe.cluster.num_nodes, recipe.cluster.gpus_per_node) == (int(name["nodes"]), int(name["gpus"]))
    assert (fp8 is not None and fp8.enabled) == bool(name["fp8"])
    assert problems(shape_of(recipe), plan_input(recipe), HARDWARE["h100"]) == []
    numbers = [line for line in path.read_text().splitlines() if SOURCED.search(line)]
    assert [line for line in numbers if "#" not in line] == [], "each names its source"


def test_every_cluster_recipe_is_in_the_table_of_the_docs() -> None:
    table = (RECIPES.parent / "docs" / "recipes.md").read_text()
    listed = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    assert sorted(listed) == sorted(path.stem for path in CLUSTER)
