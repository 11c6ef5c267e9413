"""From YAML files and overrides to one plain mapping: ``defaults:``, merging, overrides, interpolation."""

import copy
import inspect
import io
import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import (
    GrammarParseError,
    InterpolationKeyError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)
from omegaconf.resolvers import oc

from nemo_grpo.recipe.interpolation import RESOLVERS, Tree, keys_in, resolved_values
from nemo_grpo.recipe.keys import is_known, shown, unknown_key_message
from nemo_grpo.support import shipped
from nemo_grpo.support.dotted import is_missing, leaves, parents, scalars, set_value, value_of
from nemo_grpo.support.errors import UNREADABLE, UserError, first_line, reading

FLOAT32_MIN, FLOAT32_MAX = 2.0**-126, (2 - 2.0**-23) * 2.0**127
_PARSER_ERRORS = (yaml.YAMLError, OmegaConfBaseException)


_READ_FROM_ENVIRONMENT = list[str]()
"""Names of the variables that ``${oc.env:...}`` has read."""


def _environment_variable(name: str, *default: Any) -> Any:
    _READ_FROM_ENVIRONMENT.append(name)
    return oc.env(name, *default)


def register_resolvers() -> None:
    """Register ``${mul:...}`` and the like with OmegaConf, except those that NeMo-RL already registered."""
    # In OmegaConf 2.3, which NeMo-RL pins, register_resolver is an older interface without nested arguments.
    is_old = "use_cache" not in inspect.signature(OmegaConf.register_resolver).parameters
    register = OmegaConf.register_new_resolver if is_old else OmegaConf.register_resolver
    for name, function in RESOLVERS.items():
        if not OmegaConf.has_resolver(name):
            register(name, function)
    register("oc.env", _environment_variable, replace=True)


OVERRIDE = "an override"
"""Source in `Written.given` of a key from the command line."""


class Written(NamedTuple):
    """Settings as their writer left them: files merged, overrides applied, interpolations unresolved.

    Attributes: tree: nested.  given: key -> the file that gave its value, or `OVERRIDE`.
        stock: files that set no loss_fn.variant, nor do their defaults: NeMo-RL's.
    """

    tree: Tree
    given: Mapping[str, str]
    stock: frozenset[str] = frozenset()

    def over(self, base: "Written") -> "Written":
        """These settings on top of others, see `merge`."""
        tree, given = merge(base.tree, self.tree), {**base.given, **self.given}
        left = {key: given[key] for key, _ in leaves(tree) if key in given}
        return Written(tree, left, base.stock | self.stock)

    def with_overrides(self, overrides: Iterable[str]) -> "Written":
        """Apply overrides in order, see `apply_overrides`."""
        overrides = list(overrides)
        tree = apply_overrides(self.tree, overrides)
        keys = {override.removeprefix("++").partition("=")[0] for override in overrides}
        given = {
            key: self.given.get(key, OVERRIDE) if keys.isdisjoint((*parents(key), key)) else OVERRIDE
            for key, _ in leaves(tree)
        }
        return Written(tree, given, self.stock)

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
    """As `read`, the settings alone."""
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
    merged = Written(tree, {key: str(resolved) for key, _ in leaves(tree)}).over(below)
    is_stock = is_missing(merged.tree, "loss_fn.variant")
    return merged._replace(stock=below.stock | {str(resolved)}) if is_stock else merged


def _read_yaml(path: Path) -> Tree:
    if path.is_dir():
        raise UserError(f"{path} is a folder; give a recipe file")
    with reading(path, "valid YAML", "give a recipe file", *_PARSER_ERRORS):
        tree = copy.deepcopy(_parsed(path.read_text(encoding="utf-8")))
    if not isinstance(tree, dict):
        raise UserError(f"{path} holds a list; a recipe is a mapping of sections")
    return _with_plain_values(tree, str(path))


@lru_cache(maxsize=64)
def _parsed(text: str) -> Any:
    """Many recipes share a base: it is parsed once."""
    return OmegaConf.to_container(OmegaConf.load(io.StringIO(text)), resolve=False)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> Tree:
    """``over`` on top of ``base``: mappings merge key by key, everything else replaces.

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
    """A copy of ``tree`` with ``key=value``, ``++key=value`` and ``~key`` applied in order.

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
    """``key=value`` as a dotted key and a value of the type that YAML gives it."""
    key, separator, text = override.removeprefix("++").partition("=")
    if not separator or not all(key.split(".")):
        raise UserError(f"override {override!r} must be key=value, ++key=value or ~key, such as grpo.seed=1")
    with reading(f"override {shown(override)}: the value", "valid YAML", "quote it", *_PARSER_ERRORS):
        value = copy.deepcopy(_parsed_value(text))
    return key, _with_plain_values(value, "the override")["value"]


@lru_cache(maxsize=256)
def _parsed_value(text: str) -> Tree:
    """The runs of a sweep share most overrides."""
    value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)
    assert isinstance(value, dict)
    return cast(Tree, value)


def _set(tree: Tree, key: str, value: Any) -> None:
    for section in parents(key):
        below = value_of(tree, section)
        above, _, name = section.rpartition(".")
        is_null = below is None and name in (value_of(tree, above, {}) if above else tree)
        if below is None and not (is_known(key) or is_null):
            raise UserError(unknown_key_message(key, value))
        if below is not None and not isinstance(below, dict):
            raise UserError(
                f"{key}={shown(value)}: {section} is {shown(below)}, not a section; set {section} instead"
            )
    set_value(tree, key, value)


def _delete(tree: Tree, key: str) -> None:
    section, _, name = key.rpartition(".")
    node = value_of(tree, section) if section else tree
    if not isinstance(node, dict) or name not in node:
        raise UserError(f"~{key}: the recipe has no {key} to remove; look at `nemo-grpo recipe resolve`")
    del node[name]


def resolve(tree: Mapping[str, Any]) -> Tree:
    """A copy with every ``${...}`` replaced by its value.

    Raises: UserError: an interpolation names a missing key or fails, or a value is ``???``.
    """
    register_resolvers()
    try:
        resolved = resolved_values(tree)
    except MissingMandatoryValue as error:
        raise UserError(
            f"{error.full_key}=???: the recipe leaves this to you; add {error.full_key}=... "
        ) from None
    except (InterpolationKeyError, InterpolationResolutionError, GrammarParseError) as error:
        reason = f"{first_line(error)}{_referred(tree, str(error.full_key))}"
        raise UserError(f"{error.full_key}: {reason}; correct the ${{...}} of this key") from None
    except (OmegaConfBaseException, *UNREADABLE) as error:
        raise UserError(first_line(error)) from None
    return _with_plain_values(resolved, "the recipe")


def _referred(tree: Mapping[str, Any], key: str) -> str:
    """``, with grpo.seed="one"`` for each key, or section that is none, that a value refers to."""
    found = {}
    for whole in keys_in(key, value_of(tree, key)):
        parts = (*parents(whole), whole)
        last = next((part for part in parts if not isinstance(value_of(tree, part), Mapping)), whole)
        found[last] = shown(value_of(tree, last))
    return "".join(f", with {name}={value}" for name, value in found.items())


def from_environment(tree: Mapping[str, Any]) -> Tree:
    """The part of a tree, unresolved, whose texts come from environment variables: they may be secrets.

    Numbers are left out: a run's record must say which it computed with.
    """
    if not any(
        "oc.env" in text for _, value in leaves(tree) for text in scalars(value) if isinstance(text, str)
    ):
        return {}
    register_resolvers()
    return _from_environment(tree, OmegaConf.create(dict(tree)))


def _from_environment(tree: Mapping[str, Any], config: Any) -> Tree:
    found: Tree = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            if below := _from_environment(value, config[name]):
                found[name] = below
            continue
        _READ_FROM_ENVIRONMENT.clear()
        node = config[name]  # resolves it
        resolved = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
        if _READ_FROM_ENVIRONMENT and any(isinstance(scalar, str) for scalar in scalars(resolved)):
            found[name] = value
    return found


def _with_plain_values(tree: Mapping[Any, Any], where: str) -> Tree:
    """The tree, whose numbers and texts every library that reads a recipe can hold.

    Raises: UserError: an integer above 64 bits, a number that is infinite or 0 as float32, a NUL character.
    """
    for key, value in leaves(tree):
        for scalar in (key, *scalars(value)):
            if rule := _unusable(scalar):
                raise UserError(f"{where}: {key.split(chr(0))[0]:.100}: {rule}")
    return {str(key): value for key, value in tree.items()}


def _unusable(scalar: Any) -> str | None:
    """Return the reason against a number or a text, or None."""
    if isinstance(scalar, int) and scalar.bit_length() > 63:
        return f"an integer of {scalar.bit_length()} bits; the largest is {2**63 - 1}"
    is_number = isinstance(scalar, float) and math.isfinite(scalar) and scalar != 0
    if is_number and not FLOAT32_MIN <= abs(scalar) <= FLOAT32_MAX:
        return f"{scalar} is {'0' if abs(scalar) < 1 else 'infinite'} in the float32 of all computations"
    if isinstance(scalar, str) and "\0" in scalar:
        return "a text with a NUL character; remove it"
    return None
