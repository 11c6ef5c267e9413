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
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from nemo_grpo.recipe.loader import load_tree
from nemo_grpo.recipe.schema import fits, kind_of
from nemo_grpo.support.dotted import leaves, parents, scalars
from nemo_grpo.support.errors import UserError

FOLDER = Path(__file__).parents[1] / "nemo_grpo" / "recipe"
ROOTS = ("algorithms/grpo.py", "algorithms/single_controller_utils/config.py")
"""Modules whose `MasterConfig` is a recipe."""
ROOT = "MasterConfig"
GENERATION = "GenerationConfig"
TRAINING = "policy.megatron_cfg."
INFERENCE = "policy.generation.mcore_generation_config."
"""Megatron-core's inference may override what its training sets (models/generation/megatron/config.py)."""
MAPPINGS = {"dict", "Dict", "Mapping", "Any", "SchedulerMilestones"}
KINDS = {
    "bool": "bool",
    "int": "int",
    "float": "float",
    "str": "str",
    "PositiveInt": "int",
    "PositiveFloat": "float",
    "NonNegativeInt": "int",
    "NonNegativeFloat": "float",
    "list": "list",
    "List": "list",
    "tuple": "list",
    "Sequence": "list",
    **dict.fromkeys(MAPPINGS - {"Any"}, "dict"),
}
"""Name in an annotation -> type of values."""
NOT_LISTED = ("loss_fn", "env")
"""The variants define the first, users the names in the second."""
HANDED_ON = (
    "policy.dtensor_cfg.automodel_kwargs",
    "policy.generation.vllm_kwargs",
    "policy.optimizer",
    "policy.scheduler",
    f"{TRAINING}checkpoint",
    f"{TRAINING}distributed_data_parallel_config",
    f"{TRAINING}optimizer",
    f"{TRAINING}scheduler",
)
"""Sections that go to other libraries as they are."""
LONGEST_DOC = 100
"""Characters of a line of documentation."""

Entry = dict[str, Any]


class Source:
    """The configuration classes of one source folder.

    Attributes:
        folder: of the source.
        classes: by name; without those of `roots`, which share theirs.
        roots: the `MasterConfig` of `ROOTS`.
        lines: class -> the lines of its file.
        literals: name -> its ``Literal[..]``, of module-level assignments.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.classes: dict[str, ast.ClassDef] = {}
        self.roots: list[ast.ClassDef] = []
        self.lines: dict[ast.ClassDef, list[str]] = {}
        self.literals: dict[str, ast.expr] = {}
        for path in sorted((folder / "nemo_rl").rglob("*.py")):
            text = path.read_text()
            body = ast.parse(text).body
            classes = [node for node in body if isinstance(node, ast.ClassDef)]
            self.classes |= {node.name: node for node in classes if node.name != ROOT}
            self.lines |= dict.fromkeys(classes, text.splitlines())
            for node in body:
                if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Literal["):
                    self.literals[ast.unparse(node.targets[0])] = node.value
            if path.relative_to(folder / "nemo_rl").as_posix() in ROOTS:
                self.roots += [node for node in classes if node.name == ROOT]

    def entries(self) -> dict[str, Entry]:
        """Return every key of the classes and of the recipes, sorted."""
        entries = dict[str, Entry]()
        for key, entry in self._of_classes():
            entries[key] = _merged(entries[key], entry) if key in entries else entry
        for key, value in self._of_recipes():
            _widen(entries.setdefault(key, {"types": ["null"]}), value)
        for entry in entries.values():
            # A key that is null in every recipe may hold anything else, too.
            if entry.get("types") == ["null"]:
                del entry["types"]
        for key, entry in list(entries.items()):
            name = key.removeprefix(TRAINING)
            is_plain = "." not in name and "section" not in entry.get("types", ())
            if key.startswith(TRAINING) and is_plain:
                entries.setdefault(f"{INFERENCE}{name}", entry)
        entries = {key: entries[key] for key in sorted(entries) if key.split(".")[0] not in NOT_LISTED}
        free = {key for key, entry in entries.items() if entry.get("free")}
        # What users choose below a free key is no key of NeMo-RL's.
        entries = {key: entry for key, entry in entries.items() if free.isdisjoint(parents(key))}
        self._mark(entries)
        return entries | {"env": {"types": ["dict"], "free": True}}

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
            except UserError:
                # Its base lies elsewhere in the repository.
                continue
            if {"grpo", "policy"} <= set(tree):
                yield from leaves(tree)

    def _mark(self, entries: dict[str, Entry]) -> None:
        """Mark the keys whose name no Python file has, unless they are handed on to other libraries."""
        files = [path for part in ("nemo_rl", "examples") for path in (self.folder / part).rglob("*.py")]
        words = {word for path in files for word in re.findall(r"\w+", path.read_text())}
        for key, entry in entries.items():
            is_read = key.rpartition(".")[2] in words or key.split(".")[0] not in words
            if not is_read and {*parents(key)}.isdisjoint(HANDED_ON):
                entry["unread"] = True

    def _below(self, node: ast.ClassDef, prefix: str) -> Iterator[tuple[str, Entry]]:
        """Yield the keys of a class, of its bases, and of the sections in it."""
        for base in self._bases(node):
            yield from self._below(base, prefix)
        for field, after in zip(node.body, [*node.body[1:], None], strict=True):
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            # NeMo-RL itself sets the private ones.
            if field.target.id.startswith("_"):
                continue
            key = f"{prefix}{field.target.id}"
            entry = self._entry(field)
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
        """Read types, values and default from a field's annotation and value."""
        types, values = self._types(field.annotation)
        entry: Entry = {}
        if "any" not in types:
            entry["types"] = sorted(types)
        if values and "str" in types:
            entry["values"] = values
        default = field.value
        if isinstance(default, ast.Call) and ast.unparse(default.func) == "Field":
            keywords = {keyword.arg: keyword.value for keyword in default.keywords}
            positional = default.args[0] if default.args else None
            default = keywords.get("default", positional)
        if default is not None:
            # An expression that calls something is no default that JSON could hold.
            with suppress(ValueError):
                entry["default"] = ast.literal_eval(default)
        return entry

    def _types(self, annotation: ast.expr) -> tuple[set[str], list[Any]]:
        """Return the kinds of values that an annotation allows, and its literals."""
        if isinstance(annotation, ast.BinOp):
            return self._union_types([annotation.left, annotation.right])
        if isinstance(annotation, ast.Tuple):
            return self._union_types(annotation.elts)
        if isinstance(annotation, ast.Subscript):
            return self._subscript_types(annotation)
        if isinstance(annotation, ast.Constant):
            if not isinstance(annotation.value, str):
                return {"null"}, []
            quoted = ast.parse(annotation.value, mode="eval")
            assert isinstance(quoted, ast.Expression)
            return self._types(quoted.body)
        name = ast.unparse(annotation).rpartition(".")[2]
        if name in self.literals:
            return self._types(self.literals[name])
        if self._is_section(name):
            return {"section"}, []
        return {KINDS.get(name, "any")}, []

    def _union_types(self, annotations: Sequence[ast.expr]) -> tuple[set[str], list[Any]]:
        """Join the members of a union; a member that allows any text makes the others' literals moot."""
        kinds: set[str] = set()
        values: list[Any] = []
        allows_any_text = False
        for annotation in annotations:
            member_kinds, member_values = self._types(annotation)
            kinds |= member_kinds
            values += member_values
            if "str" in member_kinds and not member_values:
                allows_any_text = True
        return kinds, [] if allows_any_text else values

    def _subscript_types(self, annotation: ast.Subscript) -> tuple[set[str], list[Any]]:
        name = ast.unparse(annotation.value).rpartition(".")[2]
        if name == "Literal":
            literal = ast.literal_eval(annotation.slice)
            values = list(literal) if isinstance(literal, tuple) else [literal]
            return {kind_of(value) for value in values}, values
        if name == "Annotated":
            assert isinstance(annotation.slice, ast.Tuple)
            return self._types(annotation.slice.elts[0])
        if name in ("NotRequired", "Required", "Optional", "Union"):
            kinds, values = self._types(annotation.slice)
            if name == "Optional":
                kinds = kinds | {"null"}
            return kinds, values
        return self._types(annotation.value)

    def _doc(self, node: ast.ClassDef, field: ast.AnnAssign, after: ast.stmt | None) -> Entry:
        """Read the first sentence of a text below a field, or of the comment beside or above it."""
        text = self._doc_text(node, field, after)
        default = re.fullmatch(r"Default: (True|False|None|-?[\d.]+)", text)
        if default:
            return {"default": ast.literal_eval(default[1])}
        sentence = re.split(r"(?<=[.;])\s", " ".join(text.split()))[0].rstrip(".;")
        is_short = 0 < len(sentence) <= LONGEST_DOC and sentence.isascii() and "TODO" not in sentence
        return {"doc": sentence} if is_short else {}

    def _doc_text(self, node: ast.ClassDef, field: ast.AnnAssign, after: ast.stmt | None) -> str:
        docstring = after.value if isinstance(after, ast.Expr) else None
        if isinstance(docstring, ast.Constant) and isinstance(docstring.value, str):
            return docstring.value
        lines = self.lines[node]
        last_line = lines[(field.end_lineno or field.lineno) - 1]
        if "  # " in last_line:
            return last_line.partition("  # ")[2]
        end = field.lineno - 1
        start = end
        while start and lines[start - 1].strip().startswith("# "):
            start -= 1
        return " ".join(line.strip("# ") for line in lines[start:end])

    def _bases(self, node: ast.ClassDef) -> list[ast.ClassDef]:
        names = [name for base in node.bases for name in _names(base)]
        return [self.classes[name] for name in names if name in self.classes]

    def _is_a(self, node: ast.ClassDef, ancestor: str) -> bool:
        return node.name == ancestor or any(self._is_a(base, ancestor) for base in self._bases(node))

    def _is_section(self, name: str) -> bool:
        if name not in self.classes:
            return False
        node = self.classes[name]
        bases = {base for expression in node.bases for base in _names(expression)}
        if bases & {"TypedDict", "BaseModel"}:
            return True
        return any(self._is_section(base.name) for base in self._bases(node))


def _names(annotation: ast.expr) -> set[str]:
    """Collect every name in an annotation, those in quotes too."""
    names = set()
    for node in ast.walk(annotation):
        if isinstance(node, ast.Name):
            names.add(node.id)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            names.add(node.value)
    return names


def _refers(value: Any) -> bool:
    """True for an interpolation or a missing value, whose own type is not known."""
    return any(isinstance(text, str) and ("${" in text or text == "???") for text in scalars(value))


def _widen(entry: Entry, value: Any) -> None:
    """Let a key have a recipe's value; one that no class has may be null, and any number if it is one."""
    kind = kind_of(value)
    if "types" in entry and not _refers(value) and not fits(kind, entry["types"]):
        # Without a class only recipes tell the type, and they may write 1 for 1.0.
        if kind == "int" and "null" in entry["types"]:
            kind = "float"
        entry["types"] = sorted({*entry["types"], kind})
    if "values" in entry and isinstance(value, str) and value not in entry["values"]:
        del entry["values"]


def _merged(a: Entry, b: Entry) -> Entry:
    """Join two classes' entries of a key: any of their types, both their values."""
    merged = {**b, **a}
    for name in ("types", "values"):
        merged.pop(name, None)
        # A class without types allows any, and so do both together.
        if name in a and name in b:
            merged[name] = a[name] + [value for value in b[name] if value not in a[name]]
    return merged


def written(entries: dict[str, Entry]) -> str:
    """Write the entries as JSON, one a line, so that a change of a key is one line of a diff."""
    lines = [f"{json.dumps(key)}: {json.dumps(entry)}" for key, entry in entries.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    """Write the file of each folder on the command line."""
    parser = argparse.ArgumentParser(description="Write down the keys of NeMo-RL's recipes.")
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="source folder of NeMo-RL")
    for folder in parser.parse_args().folders:
        file = FOLDER / f"nemo_rl-{folder.name.removeprefix('nemo-rl-')}.json"
        file.write_text(written(Source(folder).entries()))
        print(file)


if __name__ == "__main__":
    main()
