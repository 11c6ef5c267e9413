"""Write down every key that a NeMo-RL recipe for GRPO can have, for `nemo_grpo.recipe.schema`.

    PYTHONPATH=. .venv/bin/python scripts/record_nemo_rl_keys.py DIR...

Reads the configuration classes (by syntax; NeMo-RL need not be installed) and the shipped recipes of each
source folder, and writes nemo_grpo/recipe/nemo_rl-VERSION.json: key -> types, values, default and a line of
documentation, where they are known. A recipe's value widens a key's types, and is all that is known of a key
without a class. ``free`` marks a mapping whose keys users choose, ``unread`` a key whose name no Python file
of the source folder has.
"""

import argparse
import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo_grpo.recipe.loader import load_tree
from nemo_grpo.recipe.schema import fits, kind_of
from nemo_grpo.support.dotted import leaves, parents, scalars
from nemo_grpo.support.errors import UserError

FOLDER = Path(__file__).parents[1] / "nemo_grpo" / "recipe"
ROOTS = ("algorithms/grpo.py", "algorithms/single_controller_utils/config.py")
"""Modules whose `MasterConfig` is a recipe."""
ROOT, GENERATION = "MasterConfig", "GenerationConfig"
TRAINED, SAMPLED = "policy.megatron_cfg.", "policy.generation.mcore_generation_config."
"""Megatron-core's inference may override what its training sets (models/generation/megatron/config.py)."""
MAPPINGS = {"dict", "Dict", "Mapping", "Any", "SchedulerMilestones"}
KINDS = {
    **{name: name for name in ("bool", "int", "float", "str")},
    **{f"{sign}{name.title()}": name for sign in ("Positive", "NonNegative") for name in ("int", "float")},
    **dict.fromkeys(("list", "List", "tuple", "Sequence"), "list"),
    **dict.fromkeys(MAPPINGS - {"Any"}, "dict"),
}
"""Name in an annotation -> type of values."""
NOT_LISTED = ("loss_fn", "env")
"""The variants define the first, users the names in the second."""
HANDED_ON = (
    *("policy.dtensor_cfg.automodel_kwargs", "policy.generation.vllm_kwargs", "policy.optimizer"),
    *("policy.scheduler", f"{TRAINED}checkpoint", f"{TRAINED}distributed_data_parallel_config"),
    *(f"{TRAINED}optimizer", f"{TRAINED}scheduler"),
)
"""Sections that go to other libraries as they are."""
LONGEST_DOC = 100
"""Characters of a line of documentation."""

Entry = dict[str, Any]


class Source:
    """The configuration classes of one source folder.

    Attributes: classes: by name, with the lines of their file.  roots: the `MasterConfig` of `ROOTS`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.classes, self.roots = folder, dict[str, ast.ClassDef](), list[ast.ClassDef]()
        self.lines, self.literals = dict[ast.ClassDef, list[str]](), dict[str, ast.expr]()
        for path in sorted((folder / "nemo_rl").rglob("*.py")):
            text = path.read_text()
            body = ast.parse(text).body
            found = [node for node in body if isinstance(node, ast.ClassDef)]
            self.classes |= {node.name: node for node in found if node.name != ROOT}
            self.lines |= dict.fromkeys(found, text.splitlines())
            for node in body:
                if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Literal["):
                    self.literals[ast.unparse(node.targets[0])] = node.value
            if path.relative_to(folder / "nemo_rl").as_posix() in ROOTS:
                self.roots += [node for node in found if node.name == ROOT]

    def entries(self) -> dict[str, Entry]:
        """Every key of the classes and of the recipes, sorted."""
        found = dict[str, Entry]()
        for key, entry in self._of_classes():
            found[key] = _merged(found[key], entry) if key in found else entry
        for key, value in self._of_recipes():
            _widen(found.setdefault(key, {"types": ["null"]}), value)
        for entry in found.values():
            if entry.get("types") == ["null"]:
                del entry["types"]
        trained = {
            key.removeprefix(TRAINED): entry for key, entry in found.items() if key.startswith(TRAINED)
        }
        for name, entry in trained.items():
            if "." not in name and "section" not in entry.get("types", ()):
                found.setdefault(f"{SAMPLED}{name}", entry)
        found = {key: found[key] for key in sorted(found) if key.split(".")[0] not in NOT_LISTED}
        free = {key for key, entry in found.items() if entry.get("free")}
        found = {key: entry for key, entry in found.items() if free.isdisjoint(parents(key))}
        self._mark(found)
        return found | {"env": {"types": ["dict"], "free": True}}

    def _of_classes(self) -> Iterator[tuple[str, Entry]]:
        for root in self.roots:
            yield from self._below(root, "")
        for node in self.classes.values():
            if self._is_a(node, GENERATION):
                yield from self._below(node, "policy.generation.")

    def _of_recipes(self) -> Iterator[tuple[str, Any]]:
        for path in sorted((self.folder / "examples").rglob("*.yaml")):
            try:
                tree = load_tree(path)
            except UserError:  # its base lies elsewhere in the repository
                continue
            if {"grpo", "policy"} <= set(tree):
                yield from leaves(tree)

    def _mark(self, entries: dict[str, Entry]) -> None:
        files = [path for part in ("nemo_rl", "examples") for path in (self.folder / part).rglob("*.py")]
        words = {word for path in files for word in re.findall(r"\w+", path.read_text())}
        for key, entry in entries.items():
            is_read = key.rpartition(".")[2] in words or key.split(".")[0] not in words
            if not is_read and {*parents(key)}.isdisjoint(HANDED_ON):
                entry["unread"] = True

    def _below(self, node: ast.ClassDef, prefix: str) -> Iterator[tuple[str, Entry]]:
        for base in self._bases(node):
            yield from self._below(base, prefix)
        for field, after in zip(node.body, [*node.body[1:], None], strict=True):
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            if field.target.id.startswith("_"):  # NeMo-RL sets it
                continue
            key, entry = f"{prefix}{field.target.id}", self._entry(field)
            names = _names(field.annotation)
            below = [self.classes[name] for name in sorted(names) if self._is_section(name)]
            is_mapping = {"dict", "section"}.intersection(entry.get("types", ())) == {"dict"}
            if names & MAPPINGS and (is_mapping or not below):
                entry["free"] = True
            else:
                for section in below:
                    yield from self._below(section, f"{key}.")
            yield key, self._doc(node, field, after) | entry

    def _entry(self, field: ast.AnnAssign) -> Entry:
        types, values = self._types(field.annotation)
        entry: Entry = {} if "any" in types else {"types": sorted(types)}
        entry |= {"values": values} if values and "str" in types else {}
        default = field.value
        if isinstance(default, ast.Call) and ast.unparse(default.func) == "Field":
            given = {keyword.arg: keyword.value for keyword in default.keywords}
            default = given.get("default", default.args[0] if default.args else None)
        try:
            return entry if default is None else entry | {"default": ast.literal_eval(default)}
        except ValueError:
            return entry

    def _types(self, annotation: ast.expr) -> tuple[set[str], list[Any]]:
        """The kinds of values that an annotation allows, and those of its literals."""
        if isinstance(annotation, ast.BinOp):
            return self._types(ast.Tuple([annotation.left, annotation.right], ast.Load()))
        if isinstance(annotation, ast.Tuple):
            found = [self._types(part) for part in annotation.elts]
            is_open = any("str" in kinds and not values for kinds, values in found)
            values = [] if is_open else [value for _, values in found for value in values]
            return {kind for kinds, _ in found for kind in kinds}, values
        if isinstance(annotation, ast.Subscript):
            name = ast.unparse(annotation.value).rpartition(".")[2]
            if name == "Literal":
                given = ast.literal_eval(annotation.slice)
                values = list(given) if isinstance(given, tuple) else [given]
                return {kind_of(value) for value in values}, values
            if name == "Annotated":
                assert isinstance(annotation.slice, ast.Tuple)
                return self._types(annotation.slice.elts[0])
            if name in ("NotRequired", "Required", "Optional", "Union"):
                kinds, values = self._types(annotation.slice)
                return kinds | ({"null"} if name == "Optional" else set()), values
            return self._types(annotation.value)
        if isinstance(annotation, ast.Constant):
            if not isinstance(annotation.value, str):
                return {"null"}, []
            quoted = ast.parse(annotation.value, mode="eval")
            assert isinstance(quoted, ast.Expression)
            return self._types(quoted.body)
        name = ast.unparse(annotation).rpartition(".")[2]
        if name in self.literals:
            return self._types(self.literals[name])
        return {"section" if self._is_section(name) else KINDS.get(name, "any")}, []

    def _doc(self, node: ast.ClassDef, field: ast.AnnAssign, after: ast.stmt | None) -> Entry:
        """The first sentence of a text below a field, or of the comment beside or above it."""
        lines = self.lines[node]
        below = after.value if isinstance(after, ast.Expr) else None
        if isinstance(below, ast.Constant) and isinstance(below.value, str):
            text = below.value
        elif "  # " in (beside := lines[(field.end_lineno or field.lineno) - 1]):
            text = beside.partition("  # ")[2]
        else:
            end = start = field.lineno - 1
            while start and lines[start - 1].strip().startswith("# "):
                start -= 1
            text = " ".join(line.strip("# ") for line in lines[start:end])
        if default := re.fullmatch(r"Default: (True|False|None|-?[\d.]+)", text):
            return {"default": ast.literal_eval(default[1])}
        sentence = re.split(r"(?<=[.;])\s", " ".join(text.split()))[0].rstrip(".;")
        is_short = 0 < len(sentence) <= LONGEST_DOC and sentence.isascii() and "TODO" not in sentence
        return {"doc": sentence} if is_short else {}

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


def _refers(value: Any) -> bool:
    return any(isinstance(text, str) and ("${" in text or text == "???") for text in scalars(value))


def _widen(entry: Entry, value: Any) -> None:
    """Let a key have a recipe's value; one that no class has may be null, and any number if it is one."""
    kind = kind_of(value)
    if "types" in entry and not _refers(value) and not fits(kind, entry["types"]):
        kind = "float" if kind == "int" and "null" in entry["types"] else kind
        entry["types"] = sorted({*entry["types"], kind})
    if "values" in entry and isinstance(value, str) and value not in entry["values"]:
        del entry["values"]


def _merged(a: Entry, b: Entry) -> Entry:
    """Join two classes' entries of a key: any of their types, both their values."""
    merged = {**b, **a}
    for name in ("types", "values"):
        merged.pop(name, None)
        if name in a and name in b:
            merged[name] = [*a[name], *(value for value in b[name] if value not in a[name])]
    return merged


def written(entries: dict[str, Entry]) -> str:
    """Entries as JSON, one a line."""
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(e)}" for key, e in entries.items()) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write down the keys of NeMo-RL's recipes.")
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="source folder of NeMo-RL")
    for folder in parser.parse_args().folders:
        file = FOLDER / f"nemo_rl-{folder.name.removeprefix('nemo-rl-')}.json"
        file.write_text(written(Source(folder).entries()))
        print(file)


if __name__ == "__main__":
    main()
