"""Loading and checking a recipe is quick: torch and transformers stay out of it."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "megatron", "numpy")

STATEMENTS = """
import nemo_grpo.cli, nemo_grpo.variants
from nemo_grpo.nemorl import doctor; doctor.recorded('0.7.0')
from nemo_grpo.recipe import load_recipe; load_recipe('recipes/quickstart-erpo.yaml')
from nemo_grpo.cli import plan; plan.plan(['recipes/erpo', 'nemo_grpo.run_name=x'])
"""


def test_recipes_load_and_are_planned_without_heavy_libraries():
    assert loaded_by(STATEMENTS, HEAVY) == "[]"


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU megatron-core's fused functions are compiled")
def test_the_engine_loads_without_torchs_compiler():
    assert loaded_by("import nemo_grpo.engine.megatron", ("torch._dynamo", "torch._inductor")) == "[]"


def test_nemo_rls_workers_load_without_griffe():
    assert loaded_by("import nemo_grpo.nemorl.compat", ("griffe",)) == "[]"


def loaded_by(statement, names):
    code = f"{statement}\nimport sys; print([name for name in {names} if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return result.stdout.splitlines()[-1]
