import os
import shutil
from pathlib import Path

import pytest
from small_runs import QUICKSTART, arguments

from nemo_grpo.engine.warm_start import starting_policy
from nemo_grpo.recipe import Recipe, load_recipe


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """Of warm starts, for all processes of the session."""
    folder = tmp_path_factory.getbasetemp()
    return (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "warm-starts"


@pytest.fixture
def recipe(tmp_path, cache):
    """Of a tiny run in ``tmp_path/name``."""

    def make(*overrides: str, name: str = "run", of: Path = QUICKSTART) -> Recipe:
        return load_recipe(of, arguments(tmp_path, cache, name, *overrides))

    return make


@pytest.fixture
def model(recipe, tmp_path):
    """A copy of the warm start, to be damaged."""
    return shutil.copytree(starting_policy(recipe()), tmp_path / "model")
