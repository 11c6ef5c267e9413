"""Loader of recipes: merges a YAML file, the files in its ``defaults:`` and overrides into one mapping."""

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
"""Section whose keys have dots in their names: they name files and functions, as my_rewards.py:brevity."""
STOCK_FOLDERS = ("/examples/configs/", "/examples/modelopt/", "/examples/nemo_gym/")
"""Folders of NeMo-RL's recipes in its repository."""
OVERRIDE = "an override"
"""Origin of a key that an override set."""


class Written(NamedTuple):
    """Settings as their authors wrote them: merged and with overrides, but with unresolved interpolations.

    Attributes:
        tree: Nested settings.
        origins: For each dotted key, the file that set it, or `OVERRIDE`.
        stock: Those of the files that are NeMo-RL's, see `_is_stock`.
        order: All files; a file comes after its bases.
    """

    tree: Tree
    origins: Mapping[str, str]
    stock: frozenset[str] = frozenset()
    order: tuple[str, ...] = ()

    def over(self, base: "Written") -> "Written":
        """Merge these settings onto the settings of a base, see `merge`."""
        tree = merge(base.tree, self.tree)
        origins = {**base.origins, **self.origins}
        # A section that replaces a plain value, or the reverse, removes keys of the base.
        present = {key: origins[key] for key, _ in leaves(tree) if key in origins}
        return Written(tree, present, base.stock | self.stock, (*base.order, *self.order))

    def with_overrides(self, overrides: Iterable[str]) -> "Written":
        """Apply overrides in order, see `apply_overrides`."""
        overrides = list(overrides)
        tree = apply_overrides(self.tree, overrides)
        overridden = {override.removeprefix("++").partition("=")[0] for override in overrides}
        origins = {}
        for key, _ in leaves(tree):
            # An override of a whole section sets all keys in it.
            is_overridden = not overridden.isdisjoint((*parents(key), key))
            origins[key] = OVERRIDE if is_overridden else self.origins.get(key, OVERRIDE)
        return Written(tree, origins, self.stock, self.order)

    def is_above(self, key: str, reference_key: str) -> bool:
        """True if a key was set on top of another key: by an override, or a file above the other's file."""
        layers = [*self.order, OVERRIDE]
        origin = self.origins.get(key)
        reference_origin = self.origins.get(reference_key)
        if origin not in layers or reference_origin not in layers:
            return False
        return layers.index(origin) > layers.index(reference_origin)

    def is_stock(self, key: str) -> bool:
        """True for a key whose value came from one of NeMo-RL's own files."""
        return self.origins.get(key) in self.stock


def read(path: str | Path, overrides: Iterable[str] = ()) -> Written:
    """Read a recipe's file, merge it onto its ``defaults``, and apply overrides.

    Args:
        path: A file, or the name of a shipped recipe, such as ``quickstart``.
        overrides: See `apply_overrides`.
    Raises: UserError: a file is missing, a sweep or not a YAML mapping, the defaults form a cycle, or an
            override cannot be applied.
    """
    path = shipped.recipe_file(path)
    written = _read(path, ())
    if list(written.tree) == ["sweep"]:
        raise UserError(f"{path} is a sweep, not a recipe; give it to `nemo-grpo sweep` or `recipe check`")
    return written.with_overrides(overrides)


def load_tree(path: str | Path) -> Tree:
    """Read a recipe like `read`, but return only the nested settings."""
    return read(path).tree


def _read(path: Path, including: tuple[Path, ...]) -> Written:
    """Read a file, and merge it onto its ``defaults``.

    Args:
        path: The file.
        including: The chain of files whose ``defaults`` led to this one, outermost first.
    """
    real_path = path.resolve()
    if real_path in including:
        cycle = [*including[including.index(real_path) :], real_path]
        names = " -> ".join(file.name for file in cycle)
        raise UserError(f"{path}: defaults form a cycle ({names}); remove one of them")

    tree = _read_yaml(path)
    bases = tree.pop("defaults", [])
    if isinstance(bases, str):
        bases = [bases]
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise UserError(f"{path}: defaults={bases!r} must be a file name or a list of file names")

    merged_bases = Written({}, {})
    for base in bases:
        file = shipped.beside(path, base)
        if not file.is_file():
            raise UserError(
                f"{path}: defaults={base!r}: there is no file {file}; paths are relative to the recipe, and "
                f"a shipped recipe is {shipped.SCHEME}base/embedded.yaml or the like"
            )
        # Later bases override earlier ones.
        merged_bases = _read(file, (*including, real_path)).over(merged_bases)

    origins = {key: str(real_path) for key, _ in leaves(tree)}
    merged = Written(tree, origins, order=(str(real_path),)).over(merged_bases)
    if _is_stock(real_path, merged.tree, is_base=bool(including)):
        merged = merged._replace(stock=merged_bases.stock | {str(real_path)})
    return merged


def _is_stock(path: Path, tree: Tree, *, is_base: bool) -> bool:
    """True for one of NeMo-RL's own files: it has no variant, and is a base or lies in a folder of NeMo-RL's.

    A file with a variant counts as the user's, wherever it lies. The recipe that a command names counts as
    the user's, too, unless it lies in a folder of NeMo-RL's: its variant may come from an override.

    Args:
        path: The file.
        tree: Settings of the file and its bases.
        is_base: True if another file names it in its ``defaults``.
    """
    if not is_missing(tree, "loss_fn.variant"):
        return False
    return is_base or any(folder in path.as_posix() for folder in STOCK_FOLDERS)


def _read_yaml(path: Path) -> Tree:
    if path.is_dir():
        raise UserError(f"{path} is a folder; give a recipe file")
    with reading(path, "valid YAML", "give a recipe file", *_PARSER_ERRORS):
        # The cached tree is shared, and `_read` removes ``defaults`` from it, so every reader gets a copy.
        tree = copy.deepcopy(_parsed(path.read_text(encoding="utf-8")))
    if not isinstance(tree, dict):
        raise UserError(f"{path} holds a list; a recipe is a mapping of sections")
    return with_plain_values(tree, str(path))


@lru_cache(maxsize=64)
def _parsed(text: str) -> Any:
    """Parse a file's text; cached, because many recipes share a base."""
    # NeMo-RL reads its files with OmegaConf, whose YAML differs from PyYAML's in numbers such as 1e-6.
    return OmegaConf.to_container(OmegaConf.load(io.StringIO(text)), resolve=False)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> Tree:
    """Merge ``over`` onto ``base``. Mappings are merged key by key; any other value replaces the base's.

    As in NeMo-RL, a mapping with ``_override_: true`` replaces the base's mapping as a whole.
    """
    merged = dict(base)
    for key, value in over.items():
        if not isinstance(value, Mapping):
            merged[key] = value
            continue
        base_section = merged.get(key)
        if value.get("_override_", False) or not isinstance(base_section, Mapping):
            base_section = {}
        section = {name: below for name, below in value.items() if name != "_override_"}
        # Merge even onto an empty base, because that removes ``_override_`` from nested mappings.
        merged[key] = merge(base_section, section)
    return merged


def apply_overrides(tree: Mapping[str, Any], overrides: Iterable[str]) -> Tree:
    """Apply ``key=value``, ``++key=value`` and ``~key`` in order to a copy of ``tree``.

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
    names = [name]
    if section:
        names += section.split(".")
    if not separator or not all(names):
        raise UserError(f"override {override!r} must be key=value, ++key=value or ~key, such as grpo.seed=1")
    with reading(f"override {shown(override)}: the value", "valid YAML", "quote it", *_PARSER_ERRORS):
        # The cached value is shared, so every caller gets a copy.
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

    The name of a reward has dots of its own: ``nemo_grpo.rewards.my_rewards.py:brevity``. A refused --resume
    prints such a key, and users copy it into an override.
    """
    if key.startswith(f"{REWARDS}."):
        return REWARDS, key.removeprefix(f"{REWARDS}.")
    section, _, name = key.rpartition(".")
    return section, name


def _set(tree: Tree, key: str, value: Any) -> None:
    """Set a key in place, and add the sections that it needs."""
    section, name = _section_and_name(key)
    enclosing_sections = [*parents(section), section] if section else []
    for enclosing in enclosing_sections:
        content = value_of(tree, enclosing)
        if content is None:
            # Refuse a misspelt section now, while the message can show the override. A section that is there
            # with the value null is spelt correctly.
            if not is_known(key) and is_missing(tree, enclosing):
                raise UserError(unknown_key_message(key, value))
            set_value(tree, enclosing, {})
        elif not isinstance(content, dict):
            raise UserError(
                f"{key}={shown(value)}: {enclosing} is {shown(content)}, not a section; set {enclosing} "
                "instead"
            )
    holder = value_of(tree, section) if section else tree
    holder[name] = value


def _delete(tree: Tree, key: str) -> None:
    """Remove a key in place."""
    section, name = _section_and_name(key)
    holder = value_of(tree, section) if section else tree
    if not isinstance(holder, dict) or name not in holder:
        raise UserError(f"~{key}: the recipe has no {key} to remove; look at `nemo-grpo recipe resolve`")
    del holder[name]
