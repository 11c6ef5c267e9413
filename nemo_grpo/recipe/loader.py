"""Loads a recipe's YAML files, their ``defaults:`` and overrides into one plain mapping."""

import copy
import io
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_grpo.recipe.interpolation import Tree, with_plain_values
from nemo_grpo.recipe.keys import is_known, unknown_key_message
from nemo_grpo.support import shipped
from nemo_grpo.support.dotted import is_missing, leaves, parents, set_value, value_of
from nemo_grpo.support.errors import UserError, reading, shown

_PARSER_ERRORS = (yaml.YAMLError, OmegaConfBaseException)

REWARDS = "nemo_grpo.rewards"
"""Section whose names are files and functions, with dots."""
STOCK_FOLDER = "/examples/configs/"
"""Folder of NeMo-RL's recipes in its repository."""
OVERRIDE = "an override"
"""Value in `Written.given` of a key that an override set."""


class Written(NamedTuple):
    """Settings as their writer left them: files merged, overrides applied, interpolations unresolved.

    Attributes: tree: nested.  given: key -> the file that gave its value, or `OVERRIDE`.
        stock: NeMo-RL's files, see `_is_stock`.  order: all files, bases first.
    """

    tree: Tree
    given: Mapping[str, str]
    stock: frozenset[str] = frozenset()
    order: tuple[str, ...] = ()

    def over(self, base: "Written") -> "Written":
        """Merge these settings onto others, see `merge`."""
        tree, given = merge(base.tree, self.tree), {**base.given, **self.given}
        left = {key: given[key] for key, _ in leaves(tree) if key in given}
        return Written(tree, left, base.stock | self.stock, (*base.order, *self.order))

    def with_overrides(self, overrides: Iterable[str]) -> "Written":
        """Apply overrides in order, see `apply_overrides`."""
        overrides = list(overrides)
        tree = apply_overrides(self.tree, overrides)
        keys = {override.removeprefix("++").partition("=")[0] for override in overrides}
        given = {
            key: self.given.get(key, OVERRIDE) if keys.isdisjoint((*parents(key), key)) else OVERRIDE
            for key, _ in leaves(tree)
        }
        return Written(tree, given, self.stock, self.order)

    def is_above(self, key: str, other: str) -> bool:
        """True if a key's value was set after another's: by an override, or a file on top of its file."""
        places = [*self.order, OVERRIDE]
        first, second = self.given.get(key), self.given.get(other)
        return first in places and second in places and places.index(first) > places.index(second)

    def is_stock(self, key: str) -> bool:
        """True for a value that came from NeMo-RL's own files."""
        return self.given.get(key) in self.stock


def read(path: str | Path, overrides: Iterable[str] = ()) -> Written:
    """Read one file merged onto its ``defaults``, with overrides.

    Args:   path: a file, or the name of a shipped recipe, such as ``quickstart``.
    Raises: UserError: a file is missing, a sweep or not a YAML mapping, the defaults form a cycle, or an
            override cannot be applied.
    """
    path = shipped.recipe_file(path)
    written = _read(path, ())
    if list(written.tree) == ["sweep"]:
        raise UserError(f"{path} is a sweep, not a recipe; give it to `nemo-grpo sweep` or `recipe check`")
    return written.with_overrides(overrides)


def load_tree(path: str | Path) -> Tree:
    """Read like `read`, but return only the settings."""
    return read(path).tree


def _read(path: Path, including: tuple[Path, ...]) -> Written:
    resolved = path.resolve()
    if resolved in including:
        circle = " -> ".join(str(p.name) for p in (*including[including.index(resolved) :], resolved))
        raise UserError(f"{path}: defaults form a cycle ({circle}); remove one of them")
    tree = _read_yaml(path)
    bases = tree.pop("defaults", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise UserError(f"{path}: defaults={bases!r} must be a file name or a list of file names")
    below = Written({}, {})
    for base in bases:
        file = shipped.beside(path, base)
        if not file.is_file():
            raise UserError(
                f"{path}: defaults={base!r}: there is no file {file}; paths are relative to the recipe, and "
                f"a shipped recipe is {shipped.SCHEME}base/embedded.yaml or the like"
            )
        below = _read(file, (*including, resolved)).over(below)
    given = {key: str(resolved) for key, _ in leaves(tree)}
    merged = Written(tree, given, order=(str(resolved),)).over(below)
    if _is_stock(resolved, merged.tree, is_base=bool(including)):
        merged = merged._replace(stock=below.stock | {str(resolved)})
    return merged


def _is_stock(path: Path, tree: Tree, *, is_base: bool) -> bool:
    """True for a file of NeMo-RL's: without a variant, and a base of another file or in NeMo-RL's folder.

    A file with a variant is its writer's, wherever it lies. So is the recipe that a command names: with
    loss_fn.variant as an override it has none in the file.
    """
    if not is_missing(tree, "loss_fn.variant"):
        return False
    return is_base or STOCK_FOLDER in path.as_posix()


def _read_yaml(path: Path) -> Tree:
    if path.is_dir():
        raise UserError(f"{path} is a folder; give a recipe file")
    with reading(path, "valid YAML", "give a recipe file", *_PARSER_ERRORS):
        tree = copy.deepcopy(_parsed(path.read_text(encoding="utf-8")))
    if not isinstance(tree, dict):
        raise UserError(f"{path} holds a list; a recipe is a mapping of sections")
    return with_plain_values(tree, str(path))


@lru_cache(maxsize=64)
def _parsed(text: str) -> Any:
    """Parse a file's text; cached, because many recipes share a base."""
    return OmegaConf.to_container(OmegaConf.load(io.StringIO(text)), resolve=False)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> Tree:
    """Merge ``over`` onto ``base``: mappings key by key, everything else replaces.

    A mapping of ``over`` with ``_override_: true`` replaces the one of ``base`` as a whole.
    """
    merged = dict(base)
    for key, value in over.items():
        if isinstance(value, Mapping):
            replaces = bool(value.get("_override_", False))
            below = merged.get(key)
            value = {k: v for k, v in value.items() if k != "_override_"}
            value = merge(below if isinstance(below, Mapping) and not replaces else {}, value)
        merged[key] = value
    return merged


def apply_overrides(tree: Mapping[str, Any], overrides: Iterable[str]) -> Tree:
    """Copy ``tree`` and apply ``key=value``, ``++key=value`` and ``~key`` in order.

    Raises: UserError: an override of another form, a new key without a section to hold it, or the
            removal of a missing key.
    """
    changed = merge({}, tree)
    for override in overrides:
        if override.startswith("~"):
            _delete(changed, override[1:])
        else:
            key, value = parse_override(override)
            _set(changed, key, value)
    return changed


def parse_override(override: str) -> tuple[str, Any]:
    """Split ``key=value`` into the dotted key and the value, typed as YAML types it."""
    key, separator, text = override.removeprefix("++").partition("=")
    section, name = _section_and_name(key)
    names = [*section.split("."), name] if section else [name]
    if not separator or not all(names):
        raise UserError(f"override {override!r} must be key=value, ++key=value or ~key, such as grpo.seed=1")
    with reading(f"override {shown(override)}: the value", "valid YAML", "quote it", *_PARSER_ERRORS):
        value = copy.deepcopy(_parsed_value(text))
    return key, with_plain_values(value, "the override")["value"]


@lru_cache(maxsize=256)
def _parsed_value(text: str) -> Tree:
    """Parse an override's value; cached, because the runs of a sweep share most overrides."""
    value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)
    assert isinstance(value, dict)
    return cast(Tree, value)


def _section_and_name(key: str) -> tuple[str, str]:
    """Split a dotted key into its section and the name in it.

    A reward's name has dots of its own: the key that a refused --resume prints is
    ``nemo_grpo.rewards.my_rewards.py:brevity``.
    """
    if key.startswith(f"{REWARDS}."):
        return REWARDS, key.removeprefix(f"{REWARDS}.")
    section, _, name = key.rpartition(".")
    return section, name


def _set(tree: Tree, key: str, value: Any) -> None:
    section, name = _section_and_name(key)
    for above in [*parents(section), section] if section else []:
        below = value_of(tree, above)
        outer, _, inner = above.rpartition(".")
        is_null = below is None and inner in (value_of(tree, outer, {}) if outer else tree)
        if below is None and not (is_known(key) or is_null):
            raise UserError(unknown_key_message(key, value))
        if below is not None and not isinstance(below, dict):
            raise UserError(
                f"{key}={shown(value)}: {above} is {shown(below)}, not a section; set {above} instead"
            )
        if below is None:
            set_value(tree, above, {})
    holder = value_of(tree, section) if section else tree
    holder[name] = value


def _delete(tree: Tree, key: str) -> None:
    section, name = _section_and_name(key)
    node = value_of(tree, section) if section else tree
    if not isinstance(node, dict) or name not in node:
        raise UserError(f"~{key}: the recipe has no {key} to remove; look at `nemo-grpo recipe resolve`")
    del node[name]
