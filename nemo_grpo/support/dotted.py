"""Dotted keys such as ``policy.generation.top_p``, in nested mappings, objects, or a mixture of both."""

from collections.abc import Iterator, Mapping
from typing import Any


def value_of(node: Any, key: str, default: Any = None) -> Any:
    """Return the value of a key; ``default`` where it is missing or null."""
    for name in key.split("."):
        node = node.get(name) if isinstance(node, Mapping) else getattr(node, name, None)
        if node is None:
            return default
    return node


def is_missing(tree: Any, key: str) -> bool:
    """True if nested mappings lack a key.

    False if the key is there, also with the value null, and if a section above it is null or a scalar.
    """
    for name in key.split("."):
        if not isinstance(tree, Mapping):
            return False
        if name not in tree:
            return True
        tree = tree[name]
    return False


def set_value(node: Any, key: str, value: Any) -> None:
    """Set a key; missing and null sections above it become mappings."""
    section, _, name = key.rpartition(".")
    if section:
        if value_of(node, section) is None:
            set_value(node, section, {})
        node = value_of(node, section)
    if isinstance(node, dict):
        node[name] = value
    else:
        setattr(node, name, value)


def parents(key: str) -> list[str]:
    """List the sections that contain a key, outermost first."""
    parts = key.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield keys and values of a nested mapping; an empty mapping counts as a value."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{key}.")
        else:
            yield key, value


def scalars(value: Any) -> Iterator[Any]:
    """Yield the scalars in a value: itself, or those of nested lists and mappings, keys included."""
    if isinstance(value, Mapping):
        for key, below in value.items():
            yield from (key, *scalars(below))
    elif isinstance(value, list | tuple):
        for below in value:
            yield from scalars(below)
    else:
        yield value
