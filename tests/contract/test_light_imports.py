"""Loading and checking a recipe is quick: torch and transformers stay out of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "megatron", "numpy")

STATEMENTS = {
    "import": "import nemo_grpo.cli, nemo_grpo.variants",
    "plan": "from nemo_grpo.cli import plan; plan.plan(['recipes/erpo', 'nemo_grpo.run_name=x'])",
    "doctor": "from nemo_grpo.nemorl import doctor; doctor.recorded('0.7.0')",
    "load": "from nemo_grpo.recipe import load_recipe; load_recipe('recipes/quickstart-erpo.yaml')",
}


@pytest.mark.parametrize("statement", STATEMENTS.values(), ids=STATEMENTS)
def test_recipes_load_without_heavy_libraries(statement: str) -> None:
    code = f"{statement}\nimport sys; print([name for name in {HEAVY} if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines()[-1] == "[]"
