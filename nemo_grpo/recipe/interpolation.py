"""Interpolation in a recipe: the values of ``${grpo.seed}``, ``${.top_p}`` or ``${mul:2, ${grpo.seed}}``."""

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

FLOAT32_MIN = 2.0**-126
"""Smallest normal number of float32."""
FLOAT32_MAX = (2 - 2.0**-23) * 2.0**127
"""Largest number of float32."""


def _product(*values: Any) -> Any:
    # In Python an integer times a text repeats the text, which no recipe means.
    if any(isinstance(value, str) for value in values):
        raise TypeError(f"mul takes numbers, not {values}")
    return math.prod(values)


RESOLVERS: dict[str, Callable[..., Any]] = {
    "add": lambda *values: sum(values),
    "mul": _product,
    "div": lambda a, b: a / b,
    "max": lambda a, b: max(a, b),
}
"""NeMo-RL's resolvers, so that a recipe has the same values on both engines."""

_REFERENCE = re.compile(r"\$\{(\.*)(\w[\w.]*)\}")
_READ_FROM_THIS_MACHINE = list[str]()
"""Names that ``${oc.env:...}`` and ``${shipped_model:...}`` have resolved since the list was last cleared.

OmegaConf gives a resolver only its arguments, so this global list tells `_resolved` that a value came from
this machine.
"""


def _environment_variable(name: str, *default: Any) -> Any:
    _READ_FROM_THIS_MACHINE.append(name)
    return oc.env(name, *default)


def _shipped_model(name: str) -> str:
    _READ_FROM_THIS_MACHINE.append(name)
    return str(shipped.model(name))


def register_resolvers() -> None:
    """Register ``${mul:...}`` and the other resolvers with OmegaConf, unless NeMo-RL has registered them."""
    # OmegaConf 2.3, which NeMo-RL pins, has an older function of the name register_resolver, which does not
    # resolve nested arguments.
    is_old = "use_cache" not in inspect.signature(OmegaConf.register_resolver).parameters
    register = OmegaConf.register_new_resolver if is_old else OmegaConf.register_resolver
    for name, function in RESOLVERS.items():
        if not OmegaConf.has_resolver(name):
            register(name, function)
    # These two always replace an earlier resolver, because ours note the names that they read.
    register("oc.env", _environment_variable, replace=True)
    register(shipped.MODEL_RESOLVER, _shipped_model, replace=True)


class Resolved(NamedTuple):
    """Settings whose interpolations are resolved.

    Attributes:
        tree: Nested settings.
        references: The unresolved form of texts that come from this machine, nested like ``tree``. They are
            environment variables, which may be secrets, and folders of the package, which lie elsewhere in
            another installation. Numbers are left out, because a run's record must show the ones it used.
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
        if _refers(tree):
            values, references = _resolved(tree, OmegaConf.create(plain))
        else:
            # OmegaConf takes most of the loading time, and a resolved recipe does not need it.
            values = plain
            references = {}
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
    """True if a value contains an interpolation, or ``???``, which marks a missing value."""
    texts = [scalar for scalar in scalars(value) if isinstance(scalar, str)]
    return any("${" in text or text == "???" for text in texts)


def _resolved(tree: Mapping[str, Any], config: DictConfig) -> tuple[Tree, Tree]:
    """Resolve a section, and collect the interpolations whose texts come from this machine.

    Args:
        tree: The section as it is written.
        config: The same section as an OmegaConf object, which resolves a value when it is read.
    """
    values = Tree()
    references = Tree()
    for name, value in tree.items():
        if isinstance(value, Mapping):
            values[name], references_below = _resolved(value, config[name])
            if references_below:
                references[name] = references_below
        elif _refers(value):
            _READ_FROM_THIS_MACHINE.clear()
            resolved = config[name]
            if OmegaConf.is_config(resolved):
                resolved = OmegaConf.to_container(resolved, resolve=True, throw_on_missing=True)
            values[name] = resolved
            has_text = any(isinstance(scalar, str) for scalar in scalars(resolved))
            if _READ_FROM_THIS_MACHINE and has_text:
                references[name] = value
        else:
            values[name] = copy.deepcopy(value)
    return values, references


def _referred(tree: Mapping[str, Any], key: str) -> str:
    """Write the values that a failed interpolation refers to, such as ``, with grpo.seed="one"``."""
    values = {}
    for referred_key in _keys_in(key, value_of(tree, key)):
        cause = referred_key
        # A reference below a scalar, as in ${grpo.seed.x}, fails because of that scalar.
        for parent in parents(referred_key):
            if not isinstance(value_of(tree, parent), Mapping):
                cause = parent
                break
        values[cause] = shown(value_of(tree, cause))
    return "".join(f", with {name}={value}" for name, value in values.items())


def _keys_in(key: str, value: Any) -> Iterator[str]:
    """Yield the absolute keys that a value refers to."""
    for dots, name in _REFERENCE.findall(str(value)):
        if dots:
            # In a relative reference one dot stands for the key's own section, two dots for the parent.
            section = key.split(".")[: -len(dots)]
            yield ".".join([*section, name])
        else:
            yield name


def with_plain_values(tree: Mapping[Any, Any], where: str) -> Tree:
    """Refuse values that torch, YAML or the operating system could not represent.

    They are integers above 64 bits, numbers that become infinite or 0 in float32, and NUL characters.

    Args:
        tree: Nested settings.
        where: File or other source of the settings, for messages.
    Returns: a copy of the settings, whose keys are texts.
    """
    for key, value in leaves(tree):
        for scalar in (key, *scalars(value)):
            rule = _unusable(scalar)
            if rule:
                # The key itself may be the bad value: it may contain a NUL character, or be very long.
                printable_key = key.split("\0")[0][:100]
                raise UserError(f"{where}: {printable_key}: {rule}")
    return {str(key): value for key, value in tree.items()}


def _unusable(scalar: Any) -> str | None:
    """Explain why a number or a text cannot be used; return None for a value that can."""
    if isinstance(scalar, int) and scalar.bit_length() > 63:
        return f"an integer of {scalar.bit_length()} bits; the largest is {2**63 - 1}"
    # A value that is written as infinity, NaN or 0 passes here: the range of its key decides about it.
    is_number = isinstance(scalar, float) and math.isfinite(scalar) and scalar != 0
    if is_number and not FLOAT32_MIN <= abs(scalar) <= FLOAT32_MAX:
        in_float32 = "0" if abs(scalar) < 1 else "infinite"
        return f"{scalar} is {in_float32} in the float32 of all computations"
    if isinstance(scalar, str) and "\0" in scalar:
        return "a text with a NUL character; remove it"
    return None
