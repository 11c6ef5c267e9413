"""A variant's or a task's name stands in its own file and its registry, and nowhere else in the product.

Everything else asks what the variant or the task declares, so that adding one is a file and a line.
"""

import ast
import re
from pathlib import Path

import pytest

from nemo_grpo.tasks import TASKS
from nemo_grpo.variants import VARIANTS

ROOT = Path(__file__).parents[2]
WORDS = {"math", "logic", "gpg", "grpo"}
"""Names that mean other things too: only as a text of their own, and ``grpo``, a section, only as a value."""
ALLOWED = {
    "nemo_grpo/data/sources.py": {"math"},  # an alias of a data set
    "nemo_grpo/evaluate/benchmarks.py": {"math"},  # the task of files without a manifest
    "nemo_grpo/support/sections.py": {"cw_grpo", "erpo", "tr_grpo"},  # the help of eval lists the protocols
    "nemo_grpo/rehearsal/tiny_data.py": {"math"},  # an environment of NeMo-RL's
    "nemo_grpo/cli/compare.py": {"cw_grpo", "tr_grpo", "erpo"},  # what it compares unless told otherwise
}


def texts(path):
    """Every string of a file but docstrings and names of keys."""
    tree = ast.parse(path.read_text())
    statements = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in statements:
            yield node.value


def names_in(text):
    found = {name for name in WORDS if re.search(rf"(variant|task\.name)={name}\b", text)}
    found |= {text} & (WORDS - {"grpo"})
    rest = {*VARIANTS, *TASKS} - WORDS
    return found | {name for name in rest if re.search(rf"(?<![\w-]){name}(?![\w-])", text)}


def own_file(path):
    """Names that a file defines: the variants and tasks whose classes stand in it."""
    module = path.removesuffix(".py").replace("/", ".")
    registered = {**VARIANTS, **TASKS}
    return {name for name, config in registered.items() if config.__module__ == module}


@pytest.mark.parametrize("package", ["nemo_grpo", "checkpoints_conv"])
def test_names_of_variants_and_tasks_stand_in_their_own_files(package):
    registries = {"nemo_grpo/variants/__init__.py", "nemo_grpo/tasks/__init__.py"}
    strangers = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name not in registries:
            found = set().union(*map(names_in, texts(path))) - own_file(name) - ALLOWED.get(name, set())
            strangers |= {name: found} if found else {}
    assert strangers == {}


@pytest.mark.parametrize("folder", ["nemo_grpo", "checkpoints_conv", "slurm"])
def test_no_message_names_a_page_which_a_wheel_lacks(folder):
    page = re.compile(r"\bdocs/\w+\.md")
    for path in sorted((ROOT / folder).rglob("*")):
        is_shell = path.suffix in (".sh", ".sbatch")
        said = texts(path) if path.suffix == ".py" else [path.read_text()] if is_shell else []
        assert [text for text in said if page.search(text)] == [], path
