"""Schema of NeMo-RL's sections: keys, types and defaults of two recorded versions.

scripts/record_nemo_rl_keys.py reads them from the configuration classes and recipes in NeMo-RL's source, and
writes nemo_rl-VERSION.json.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any

from nemo_grpo.support.dotted import leaves, parents
from nemo_grpo.support.errors import shown

V0_7_0 = "0.7.0"
HEAD = "7ea279abf"
"""Versions of NeMo-RL that are recorded: a release, and a commit of its main branch."""
Entry = Mapping[str, Any]

LOGGERS = ("logger.mlflow", "logger.swanlab", "logger.tensorboard", "logger.wandb")
"""Sections whose values are arguments of a tracker's library, which checks their types."""
FREE_FORM = (
    "policy.dtensor_cfg.automodel_kwargs",
    "data.train",
    "data.validation",
    "data.default",
    "async_rl.sampler",
    *LOGGERS,
)
"""Sections that accept any key, because NeMo-RL passes them on. The recorded data mark further ones."""

_KINDS = {bool: "bool", int: "int", float: "float", str: "str", type(None): "null", list: "list"}
"""Python's type -> name of the type in the recorded data. Every other type counts as "dict"."""
_NAMES = {
    "null": "null",
    "bool": "a boolean",
    "int": "an integer",
    "float": "a float",
    "str": "a text",
    "list": "a list",
    "dict": "a section",
}
"""Type in the recorded data -> its name in a message after "is"."""
EXPECTED = _NAMES | {
    "bool": "true or false",
    "float": "a number",
    "dict": "a section of keys",
    "section": "a section of keys",
}
"""Type in the recorded data -> its name in a message after "must be"."""


@cache
def recorded(version: str) -> Mapping[str, Entry]:
    """Read the schema of one version: entries by dotted key."""
    text = resources.files("nemo_grpo.recipe").joinpath(f"nemo_rl-{version}.json").read_text(encoding="utf-8")
    return json.loads(text)


@cache
def entries() -> Mapping[str, tuple[Entry, ...]]:
    """Map each key to its entries in the versions that have it."""
    # The newer version comes first, because a message about a wrong value describes the first entry.
    newest = recorded(HEAD)
    oldest = recorded(V0_7_0)
    return {
        key: tuple(version[key] for version in (newest, oldest) if key in version)
        for key in sorted({*newest, *oldest})
    }


@cache
def nemo_rl_keys() -> frozenset[str]:
    """Collect the dotted leaf keys of NeMo-RL's sections."""
    return frozenset(
        key
        for key, versions in entries().items()
        if not any("section" in entry.get("types", ()) for entry in versions)
    )


@cache
def unread_keys() -> frozenset[str]:
    """Collect the keys that occur in NeMo-RL's own recipes although none of its code reads them."""
    return frozenset(
        key for key, versions in entries().items() if all(entry.get("unread") for entry in versions)
    )


@cache
def free_form() -> frozenset[str]:
    """Collect the sections that take any key."""
    marked = (key for key, versions in entries().items() if any(entry.get("free") for entry in versions))
    return frozenset(marked).union(FREE_FORM)


def kind_of(value: Any) -> str:
    """Name a value's type as in the recorded data."""
    return _KINDS.get(type(value), "dict")


def kind_named(value: Any) -> str:
    """Name a value's type in a message."""
    return _NAMES[kind_of(value)]


def fits(kind: str, types: Collection[str]) -> bool:
    """True if a key of these types accepts a value of this type."""
    # A null section counts as missing.
    if "section" in types and kind in ("null", "dict"):
        return True
    # A recipe may write 1 for the float 1.0.
    is_whole_float = kind == "int" and "float" in types
    return kind in types or is_whole_float


def type_errors(tree: Mapping[str, Any], declared: Collection[str], section: str = "") -> Iterator[str]:
    """Yield one message for each value of a type that no version of NeMo-RL has.

    Args:
        tree: Settings below ``section``.
        declared: Keys that are not checked here, because our models check their types.
        section: Dotted key of the section, with a dot at the end.
    """
    for name, value in tree.items():
        key = f"{section}{name}"
        versions = () if key in declared else entries().get(key, ())
        if versions and not any(_allows(entry, value) for entry in versions):
            yield _message(key, value, versions[0])
        elif isinstance(value, Mapping) and key not in LOGGERS:
            yield from type_errors(value, declared, f"{key}.")


def _allows(entry: Entry, value: Any) -> bool:
    """True if an entry of the schema accepts this value."""
    # Only a text can be one of the fixed values. Another value, such as null, is checked by its type.
    if "values" in entry and isinstance(value, str):
        return value in entry["values"]
    return "types" not in entry or fits(kind_of(value), entry["types"])


def _message(key: str, value: Any, entry: Entry) -> str:
    """Write that a key does not accept this value, and the values that it accepts."""
    if "values" in entry and isinstance(value, str):
        return f"{key}={shown(value)} must be one of {', '.join(map(str, entry['values']))}"
    # Remove repetitions: "dict" and "section" have the same name in a message.
    expected = " or ".join(dict.fromkeys(EXPECTED[kind] for kind in entry["types"]))
    doc = f" ({entry['doc']})" if "doc" in entry else ""
    return f"{key}={shown(value)} is {kind_named(value)}; it must be {expected}{doc}"


def lacking(version: str, settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the settings, key and value, that an older NeMo-RL would ignore.

    Settings that are off, or that have the newer version's default, are left out.
    """
    old_entries = recorded(version)
    new_entries = recorded(HEAD)
    free = {key for key, entry in old_entries.items() if entry.get("free")}.union(FREE_FORM)
    for key, value in leaves(settings):
        sections = parents(key)
        if not free.isdisjoint(sections):
            continue
        # A key that users name themselves is not recorded; then the innermost recorded section counts.
        recorded_key = next((part for part in (key, *reversed(sections)) if part in new_entries), None)
        if recorded_key is None or recorded_key in old_entries:
            continue
        entry = new_entries[recorded_key]
        is_off = value in (None, False, {}, [])
        if not entry.get("unread") and not is_off and value != entry.get("default"):
            yield key, value
