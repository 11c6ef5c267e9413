"""A variant, a task, a data set and a family, added to a copy of the repository as the documents say."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from test_documents import ROOT, blocks

pytestmark = pytest.mark.slow
TRAIN = ["nemo_grpo.cli", "train", "recipes/quickstart.yaml", "grpo.max_num_steps=1"]
TRAIN += ["grpo.val_period=0"]
ADDITIONS = {
    "variant": (
        ("CONTRIBUTING.md", "## Add a variant"),
        ["pytest", "tests/unit/variants/test_invariance.py", "-k", "rare_tokens"],
        [*TRAIN[:2], "recipes/quickstart-rare_tokens.yaml", *TRAIN[3:]],
    ),
    "task": (
        ("docs/tasks.md", "## Add a task"),
        ["pytest", "tests/unit/tasks/test_tasks.py", "-k", "letters"],
        [*TRAIN, "nemo_grpo.task.name=letters"],
    ),
    "data set": (
        ("CONTRIBUTING.md", "## Add a data set"),
        ["pytest", "tests/unit/data/test_prepare.py", "-k", "my-problems"],
    ),
    "family": (
        ("docs/converters.md", "## Adding a family"),
        ["pytest", "tests/conv/test_round_trip.py", "tests/conv/test_families.py", "-k", "ministral"],
        ["pytest", "tests/integration/test_megatron_policy.py", "-k", "ministral"],
        ["pytest", "tests/unit/sampling/test_decoder.py", "-k", "ministral"],
    ),
}


@pytest.mark.parametrize(("where", "commands"), [(a[0], a[1:]) for a in ADDITIONS.values()], ids=ADDITIONS)
def test_an_addition_works_as_it_is_written(tmp_path, where, commands):
    for part in ("nemo_grpo", "checkpoints_conv", "recipes", "tests"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    document, heading = where
    text = (ROOT / document).read_text(encoding="utf-8")
    section = tmp_path / "section.md"
    section.write_text(re.split(r"^## ", text[text.index(heading) + 3 :], maxsplit=1, flags=re.MULTILINE)[0])
    for language in ("python", "yaml"):
        for block in blocks(section, language):
            (tmp_path / block.partition("\n")[0].removeprefix("# ")).write_text(block)
    for block in blocks(section, "diff"):
        apply(block, tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    for command in commands:
        line = [sys.executable, "-m", *command]
        done = subprocess.run(
            line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def apply(block, folder):
    """A diff without line numbers."""
    name, *lines = block.splitlines()
    path = folder / name.removeprefix("--- ")
    old, new = ("".join(f"{x[1:]}\n" for x in lines if x[:1] in kinds) for kinds in ((" ", "-"), (" ", "+")))
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{path}: {text.count(old)} x {old}"
    path.write_text(text.replace(old, new), encoding="utf-8")
