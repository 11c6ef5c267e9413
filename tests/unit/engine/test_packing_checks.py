"""What of sequence packing the embedded engine refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_grpo import UserError
from nemo_grpo.engine import checks
from nemo_grpo.recipe import Recipe, load_recipe


def quickstart(*overrides: str) -> Recipe:
    return load_recipe(Path(__file__).parents[3] / "recipes/quickstart.yaml", overrides)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm=concatenative", "algorithm=concatenative is not supported .* use first_fit_decreasing"),
        ("fuse_loss=true", "fuse_loss=True is not supported"),
    ],
)
def test_what_would_be_ignored_is_refused_only_when_packing(override, message):
    given = f"policy.sequence_packing.{override}"
    with pytest.raises(UserError, match=message):
        checks.check_supported(quickstart(given))
    checks.check_supported(quickstart(given, "policy.sequence_packing.enabled=false"))
