"""Which of our workers a recipe needs; the others train with NeMo-RL's own."""

from pathlib import Path

import pytest

from nemo_grpo.nemorl.policy import ENTROPY_WORKER, WORKER, worker_class
from nemo_grpo.recipe import load_recipe

RECIPES = Path(__file__).parents[3] / "recipes"
GRPO = "cw_grpo/grpo-r1-distill-qwen-1.5b-1n8g.yaml"
PP2 = "policy.megatron_cfg.pipeline_model_parallel_size=2"
WARM, COLD = "policy.generation.temperature=1.0", "policy.generation.temperature=0.7"


@pytest.mark.parametrize(
    ("recipe", "overrides", "worker"),
    [
        (GRPO, [PP2, COLD], WORKER),
        (GRPO, [PP2, WARM], None),
        (GRPO, [COLD], None),
        ("erpo/erpo-qwen2.5-7b-1n8g.yaml", [], ENTROPY_WORKER),
        ("tr_grpo/tr_grpo-llama-3.1-70b-instruct-logic-8n8g.yaml", [], WORKER),
    ],
)
def test_only_temperature_with_pipeline_parallelism_and_entropies_need_a_worker_of_ours(
    recipe, overrides, worker
):
    assert worker_class(load_recipe(RECIPES / recipe, overrides)) == worker
