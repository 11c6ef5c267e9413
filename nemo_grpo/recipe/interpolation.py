"""Interpolation of references in a recipe: ``${grpo.seed}``, ``${.top_p}``, ``${mul:2, ${grpo.seed}}``."""

import copy
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    GrammarParseError,
    InterpolationKeyError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)
from omegaconf.resolvers import oc

from nemo_grpo.support import shipped
from nemo_grpo.support.dotted import leaves, parents, scalars, value_of
from nemo_grpo.support.errors import UNREADABLE, UserError, first_line, shown

Tree = dict[str, Any]

FLOAT32_MIN, FLOAT32_MAX = 2.0**-126, (2 - 2.0**-23) * 2.0**127


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

_REFERENCE = re.compile(r"\$\{(\.*)(\w[\w.]*)\}")
_READ_FROM_THIS_MACHINE = list[str]()
"""Names that ``${oc.env:...}`` and ``${shipped_model:...}`` have read."""


def _environment_variable(name: str, *default: Any) -> Any:
    _READ_FROM_THIS_MACHINE.append(name)
    return oc.env(name, *default)


def _shipped_model(name: str) -> str:
    _READ_FROM_THIS_MACHINE.append(name)
    return str(shipped.model(name))


def register_resolvers() -> None:
    """Register ``${mul:...}`` and the like with OmegaConf, except those that NeMo-RL already registered."""
    # In OmegaConf 2.3, which NeMo-RL pins, register_resolver is an older interface without nested arguments.
    is_old = "use_cache" not in inspect.signature(OmegaConf.register_resolver).parameters
    register = OmegaConf.register_new_resolver if is_old else OmegaConf.register_resolver
    for name, function in RESOLVERS.items():
        if not OmegaConf.has_resolver(name):
            register(name, function)
    register("oc.env", _environment_variable, replace=True)
    register(shipped.MODEL_RESOLVER, _shipped_model, replace=True)


class Resolved(NamedTuple):
    """Settings without references.

    Attributes:
        tree: nested.
        references: texts that come from this machine, in their unresolved form: environment variables, which
            may be secrets, and folders of the package, which another installation has elsewhere. Numbers are
            not among them: a run's record must show the ones it used.
    """

    tree: Tree
    references: Tree


def resolve(tree: Mapping[str, Any]) -> Resolved:
    """Replace every ``${...}`` by its value, in a copy.

    Raises: UserError: an interpolation names a missing key or fails, or a value is ``???``.
    """
    register_resolvers()
    try:
        plain = copy.deepcopy(dict(tree))
        values, references = _resolved(tree, OmegaConf.create(plain)) if _refers(tree) else (plain, {})
    except MissingMandatoryValue as error:
        raise UserError(
            f"{error.full_key}=???: the recipe leaves this to you; add {error.full_key}=... "
        ) from None
    except (InterpolationKeyError, InterpolationResolutionError, GrammarParseError) as error:
        reason = f"{first_line(error)}{_referred(tree, str(error.full_key))}"
        raise UserError(f"{error.full_key}: {reason}; correct the ${{...}} of this key") from None
    except (OmegaConfBaseException, *UNREADABLE) as error:
        raise UserError(first_line(error)) from None
    return Resolved(with_plain_values(values, "the recipe"), references)


def _refers(value: Any) -> bool:
    return any(isinstance(text, str) and ("${" in text or text == "???") for text in scalars(value))


def _resolved(tree: Mapping[str, Any], config: DictConfig) -> tuple[Tree, Tree]:
    values, references = Tree(), Tree()
    for name, value in tree.items():
        if isinstance(value, Mapping):
            values[name], below = _resolved(value, config[name])
            references |= {name: below} if below else {}
        elif _refers(value):
            _READ_FROM_THIS_MACHINE.clear()
            node = config[name]  # resolves it
            is_node = OmegaConf.is_config(node)
            found = OmegaConf.to_container(node, resolve=True, throw_on_missing=True) if is_node else node
            values[name] = found
            if _READ_FROM_THIS_MACHINE and any(isinstance(scalar, str) for scalar in scalars(found)):
                references[name] = value
        else:
            values[name] = copy.deepcopy(value)
    return values, references


def _referred(tree: Mapping[str, Any], key: str) -> str:
    """Write ``, with grpo.seed="one"`` for each key that a value refers to, or a parent that is a value."""
    found = {}
    for whole in _keys_in(key, value_of(tree, key)):
        parts = (*parents(whole), whole)
        last = next((part for part in parts if not isinstance(value_of(tree, part), Mapping)), whole)
        found[last] = shown(value_of(tree, last))
    return "".join(f", with {name}={value}" for name, value in found.items())


def _keys_in(key: str, value: Any) -> Iterator[str]:
    """Yield the absolute keys that a value refers to."""
    for dots, name in _REFERENCE.findall(str(value)):
        yield ".".join([*key.split(".")[: -len(dots)], name]) if dots else name


def with_plain_values(tree: Mapping[Any, Any], where: str) -> Tree:
    """Refuse numbers and texts that not every library that reads a recipe can hold.

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
