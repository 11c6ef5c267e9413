import shutil
from pathlib import Path

import pytest
from small_runs import QUICKSTART, arguments

from nemo_grpo.recipe import Recipe, load_recipe


@pytest.fixture
def recipe(tmp_path):
    """Of a tiny run in ``tmp_path/name``."""

    def make(*overrides: str, name: str = "run", of: Path = QUICKSTART) -> Recipe:
        return load_recipe(of, arguments(tmp_path, name, *overrides))

    return make


@pytest.fixture
def model(recipe, tmp_path):
    """A copy of the starting policy, to be damaged."""
    return shutil.copytree(recipe().policy.model_name, tmp_path / "model")
