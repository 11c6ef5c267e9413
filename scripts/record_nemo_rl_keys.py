"""Write down every key that a NeMo-RL recipe for GRPO can have, for `nemo_grpo.recipe.keys`.

    PYTHONPATH=. .venv/bin/python scripts/record_nemo_rl_keys.py DIR...

Reads the configuration classes (by syntax; NeMo-RL need not be installed) and the shipped recipes of each
source folder, and writes nemo_grpo/recipe/nemo_rl_keys.txt: names alone. ``key.*`` stands for a mapping whose
keys users choose, ``key unread`` for a key whose name no Python file of any source folder has.
"""

import argparse
import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from nemo_grpo.recipe.keys import UNREAD
from nemo_grpo.recipe.loader import load_tree
from nemo_grpo.support.dotted import leaves, parents
from nemo_grpo.support.errors import UserError

FILE = Path(__file__).parents[1] / "nemo_grpo" / "recipe" / "nemo_rl_keys.txt"
HEADER = """\
# Known keys of a NeMo-RL GRPO recipe: its configuration classes and shipped recipes, versions {versions}.
# Written by scripts/record_nemo_rl_keys.py. loss_fn is not listed: the variants define it.
"""
ROOTS = ("algorithms/grpo.py", "algorithms/single_controller_utils/config.py")
"""Modules whose `MasterConfig` is a recipe."""
ROOT, GENERATION = "MasterConfig", "GenerationConfig"
TRAINED, SAMPLED = "policy.megatron_cfg.", "policy.generation.mcore_generation_config."
"""Megatron-core's inference may override what its training sets (models/generation/megatron/config.py)."""
MAPPINGS = {"dict", "Any", "Mapping", "SchedulerMilestones"}
NOT_LISTED = ("loss_fn", "env")
"""The variants define the first, users the names in the second."""
HANDED_ON = (
    *("policy.dtensor_cfg.automodel_kwargs", "policy.generation.vllm_kwargs", "policy.optimizer"),
    *("policy.scheduler", f"{TRAINED}checkpoint", f"{TRAINED}distributed_data_parallel_config"),
    *(f"{TRAINED}optimizer", f"{TRAINED}scheduler"),
)
"""Sections that go to other libraries as they are."""

Classes = dict[str, ast.ClassDef]


class Source:
    """The configuration classes of one source folder.

    Attributes: classes: by name.  roots: the `MasterConfig` of `ROOTS`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.classes, self.roots = folder, Classes(), list[ast.ClassDef]()
        for path in sorted((folder / "nemo_rl").rglob("*.py")):
            found = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
            self.classes |= {node.name: node for node in found if node.name != ROOT}
            if path.relative_to(folder / "nemo_rl").as_posix() in ROOTS:
                self.roots += [node for node in found if node.name == ROOT]

    def words(self) -> set[str]:
        """Every word of the package and of the scripts that start it."""
        files = [path for part in ("nemo_rl", "examples") for path in (self.folder / part).rglob("*.py")]
        return {word for path in files for word in re.findall(r"\w+", path.read_text())}

    def keys(self) -> Iterator[str]:
        """Of the classes, then of the recipes."""
        for root in self.roots:
            yield from self._keys_of(root, "")
        for name, node in self.classes.items():
            if self._is_a(node, GENERATION):
                yield from self._keys_of(self.classes[name], "policy.generation.")
        for path in sorted((self.folder / "examples").rglob("*.yaml")):
            try:
                tree = load_tree(path)
            except UserError:  # its base lies elsewhere in the repository
                continue
            if {"grpo", "policy"} <= set(tree):
                yield from (key for key, _ in leaves(tree))

    def _keys_of(self, node: ast.ClassDef, prefix: str) -> Iterator[str]:
        for base in self._bases(node):
            yield from self._keys_of(base, prefix)
        for field in node.body:
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            if field.target.id.startswith("_"):  # NeMo-RL sets it
                continue
            key, names = f"{prefix}{field.target.id}", _names(field.annotation)
            below = [self.classes[name] for name in names if self._is_section(name)]
            for section in below:
                yield from self._keys_of(section, f"{key}.")
            if names & MAPPINGS and not below:
                yield f"{key}.*"
            elif not below:
                yield key

    def _bases(self, node: ast.ClassDef) -> list[ast.ClassDef]:
        names = [name for base in node.bases for name in _names(base)]
        return [self.classes[name] for name in names if name in self.classes]

    def _is_a(self, node: ast.ClassDef, ancestor: str) -> bool:
        return node.name == ancestor or any(self._is_a(base, ancestor) for base in self._bases(node))

    def _is_section(self, name: str) -> bool:
        if name not in self.classes:
            return False
        node = self.classes[name]
        own = {base for expression in node.bases for base in _names(expression)}
        return bool(own & {"TypedDict", "BaseModel"}) or any(
            self._is_section(base.name) for base in self._bases(node)
        )


def _names(annotation: ast.expr) -> set[str]:
    """Every name in an annotation, those in quotes too."""
    found = {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}
    texts = [node.value for node in ast.walk(annotation) if isinstance(node, ast.Constant)]
    return found | {text for text in texts if isinstance(text, str) and text.isidentifier()}


def listed(keys: Iterable[str]) -> list[str]:
    """Sorted, without what lies below a mapping whose keys users choose."""
    every = {key for key in keys if key.split(".")[0] not in NOT_LISTED}
    trained = {key.removeprefix(TRAINED) for key in every if key.startswith(TRAINED)}
    every |= {f"{SAMPLED}{name}" for name in trained if "." not in name}
    free = {key.removesuffix(".*") for key in every if key.endswith(".*")}
    return sorted(
        key for key in every if not any(part in free for part in (*parents(key), key) if part + ".*" != key)
    )


def marked(keys: Iterable[str], words: set[str]) -> Iterator[str]:
    """The keys, with a mark at those whose section is read and whose own name is not."""
    for key in keys:
        is_read = key.rpartition(".")[2] in words | {"*"} or key.split(".")[0] not in words
        yield key if is_read or not {*parents(key)}.isdisjoint(HANDED_ON) else f"{key}{UNREAD}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write down the keys of NeMo-RL's recipes.")
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="source folder of NeMo-RL")
    folders = parser.parse_args().folders
    sources = [Source(folder) for folder in folders]
    keys = [key for source in sources for key in source.keys()]  # noqa: SIM118
    words = {word for source in sources for word in source.words()}
    versions = " and ".join(folder.name.removeprefix("nemo-rl-") for folder in folders)
    text = "\n".join([*marked(listed(keys), words), "env.*"])
    FILE.write_text(f"{HEADER.format(versions=versions)}{text}\n")
    print(FILE)


if __name__ == "__main__":
    main()
