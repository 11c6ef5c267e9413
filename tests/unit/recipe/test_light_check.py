"""Loading and checking a recipe imports no torch and runs no loss."""

import subprocess
import sys

import pytest

from nemo_grpo.variants import VARIANTS

CHECK = """
import sys
from nemo_grpo.cli import app
try:
    app(sys.argv[1:])
except SystemExit as end:
    assert end.code in (0, None), end.code
print("torch" in sys.modules)
"""


def says(*arguments: str, code: str = CHECK) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


FORCED = "loss_fn.force_on_policy_ratio=true"
"""Its validator asks if `shape` reads scores."""


@pytest.mark.parametrize("line", [("quickstart",), ("cluster-quickstart", FORCED)])
def test_checking_a_recipe_imports_no_torch(line):
    assert says("recipe", "check", *line) == "False"


def test_properties_of_a_variant_import_no_torch():
    code = """
import sys
from nemo_grpo.variants import VARIANTS, parse_loss_fn
for name in sys.argv[1:]:
    config = parse_loss_fn({"variant": name, "max_response_length": 7})
    config.needs_scores, config.folds, config.spans_groups, config.build()
print("torch" in sys.modules)
"""
    assert says(*VARIANTS, code=code) == "False"
