"""A recipe's values that refer to others: ``${grpo.seed}``, ``${.top_p}``, ``${mul:2, ${grpo.seed}}``."""

import copy
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_grpo.support.dotted import leaves, scalars, set_value, value_of

Tree = dict[str, Any]


def _product(*values: Any) -> Any:
    if any(isinstance(value, str) for value in values):  # a text times an integer is a longer text
        raise TypeError(f"mul takes numbers, not {values}")
    return math.prod(values)


RESOLVERS: dict[str, Callable[..., Any]] = {
    "add": lambda *values: sum(values),
    "mul": _product,
    "div": lambda a, b: a / b,
    "max": lambda a, b: max(a, b),
}
"""NeMo-RL's resolvers, so that a file means the same to both engines."""

_SCALARS = (str, int, float, type(None))
_REFERENCE = re.compile(r"\$\{(\.*)(\w[\w.]*)\}")
_CALL = re.compile(rf"\$\{{(?:{'|'.join(RESOLVERS)}):[^${{}}]*\}}")


def resolved_values(tree: Mapping[str, Any]) -> Tree:
    """As `by_omegaconf`, which gets one value at a time with those that it refers to.

    A recipe refers to few of its values, and recipes with a common base to the same ones.

    Raises: OmegaConfBaseException: as it does.
    """
    values = dict(leaves(tree))
    if not all(_is_simple(value) and value_of(tree, key) is value for key, value in values.items()):
        return by_omegaconf(tree)
    resolved = copy.deepcopy(dict(tree))
    for key, value in values.items():
        if "${" in str(value):
            part = json.dumps(_part(key, values))
            try:
                set_value(resolved, key, copy.deepcopy(value_of(_resolved_part(part), key)))
            except OmegaConfBaseException:
                return by_omegaconf(tree)  # its message names the first that is wrong
    return resolved


def by_omegaconf(tree: Mapping[str, Any]) -> Tree:
    """Every ``${...}`` replaced by its value.  Raises: OmegaConfBaseException: one cannot be."""
    resolved = OmegaConf.to_container(OmegaConf.create(dict(tree)), resolve=True, throw_on_missing=True)
    assert isinstance(resolved, dict)
    return cast(Tree, resolved)


@lru_cache(maxsize=1024)
def _resolved_part(part: str) -> Tree:
    return by_omegaconf(json.loads(part))


def _is_simple(value: Any) -> bool:
    """True for a value whose references are all seen by `keys_in`."""
    if isinstance(value, list):
        return all(isinstance(s, _SCALARS) and not _refers(s) for s in scalars(value))
    if not isinstance(value, str):
        return isinstance(value, _SCALARS) or value == {}
    if not _refers(value):
        return True
    text, before = _REFERENCE.sub("", value), ""
    while text != before:  # the innermost call first
        text, before = _CALL.sub("", text), text
    return not _refers(text)


def _refers(value: Any) -> bool:
    return isinstance(value, str) and ("${" in value or value == "???")


def keys_in(key: str, value: Any) -> Iterator[str]:
    """The absolute keys that a value refers to."""
    for dots, name in _REFERENCE.findall(str(value)):
        yield ".".join([*key.split(".")[: -len(dots)], name]) if dots else name


def _part(key: str, values: Mapping[str, Any]) -> Tree:
    """The part of a recipe with a value and all that it refers to, through any number of others.

    Args: values: the recipe's `leaves`.
    """
    found, waiting = set[str](), [key]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            for other in keys_in(name, values[name]):
                waiting += [other] if other in values else _near(other, values)
    part: Tree = {}
    for name in sorted(found, key=list(values).index):  # a section keeps its order
        set_value(part, name, values[name])
    return part


def _near(key: str, values: Iterable[str]) -> list[str]:
    """The values below a section, or the one in whose place the key would need a section."""
    return [name for name in values if name.startswith(f"{key}.") or key.startswith(f"{name}.")]
