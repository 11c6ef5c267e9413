"""Rows of the tables of rules about recipes: limits on a value, refusals, and relations of two values.

A row states the recipes that it applies to (a `Scope` and a function in `conditions`), the rule, and a reason
that ends with the remedy. `tables` collects the modules that hold rows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from pydantic import BaseModel

from nemo_grpo.recipe.recipe import Recipe
from nemo_grpo.recipe.registry import Scope
from nemo_grpo.support.dotted import value_of
from nemo_grpo.support.errors import as_yaml

Condition = Callable[[Recipe], bool]
"""Test of a recipe. `recipe rules` prints the name of the function."""
Reason = str | Callable[[Recipe], str]
"""Reason and remedy in a message. A function can quote values of the recipe."""


def always(recipe: Recipe) -> bool:
    """Return True, for a row that applies to every recipe of its scope."""
    return True


@dataclass(frozen=True)
class Allowed:
    """Values that a limit allows.

    Attributes:
        text: Predicate of a sentence whose subject is the key, such as "must be null or false".
        holds: Test of a value.
        values: The values, if they can be listed.
    """

    text: str
    holds: Callable[[Any], bool]
    values: tuple[Any, ...] = ()


def _listed(values: tuple[Any, ...]) -> str:
    *first, last = [as_yaml(value) for value in values]
    return f"{', '.join(first)} or {last}" if first else last


def one_of(*values: Any) -> Allowed:
    """Allow these values."""
    return Allowed(f"must be {_listed(values)}", values.__contains__, values)


def items_of(*items: str) -> Allowed:
    """Allow null, and lists of some of these items."""

    def holds(value: list[str] | None) -> bool:
        return value is None or all(item in items for item in value)

    return Allowed(f"must list only {_listed(items)}", holds, items)


def _is_metric_of(*prefixes: str) -> Callable[[str | None], bool]:
    """Make a test of a metric's prefix. Null passes, because it turns the ranking of checkpoints off."""
    return lambda metric: not metric or metric.startswith(prefixes)


UNSET = one_of(None)
OFF = one_of(None, False)
ON = one_of(True)
ABSENT = one_of(None, {})
"""A section that is missing or empty."""
EMPTY = one_of(None, [])
NOT_NULL = Allowed("must not be null", lambda value: value is not None)
NOT_EMPTY = Allowed("must not be empty", bool)
ABOVE_0 = Allowed("must be above 0", lambda value: value is not None and value > 0)
TWO_OR_MORE = Allowed("must be 2 or more", lambda value: value >= 2)
OF_TRAINING = Allowed("must be a metric of training", _is_metric_of("train:"))
# A name without a prefix passes, too: the embedded engine ranks by metrics of validation only.
OF_VALIDATION = Allowed(
    "must be a metric of validation", lambda metric: not metric or not metric.startswith("train:")
)
OF_EITHER = Allowed("must be a metric of training or validation", _is_metric_of("val:", "train:"))


@dataclass(frozen=True)
class Limit:
    """Row that allows only some values of a key.

    Attributes:
        key: Dotted key. If no model declares the key, its value is null unless the recipe sets it.
        allowed: The allowed values.
        reason: Reason for the limit, and the remedy.
        where: Recipes that the row applies to.
        when: Further condition on the recipe.
    """

    key: str
    allowed: Allowed
    reason: Reason
    where: Scope
    when: Condition = always

    @property
    def rule(self) -> str:
        """The row in words, without its reason."""
        return f"{self.key} {self.allowed.text}"

    def message(self, recipe: Recipe) -> str | None:
        """Write a message if the value is not allowed, or return None."""
        value = value_of(recipe, self.key)
        # The value is tested first: a condition may ask the loss, which takes longer.
        if self.allowed.holds(value) or not self.when(recipe):
            return None
        return f"{_named(self.key, value)}: {_written(self.reason, recipe)}"


def limits_on(
    keys: tuple[str, ...], allowed: Allowed, reason: Reason, where: Scope, when: Condition = always
) -> tuple[Limit, ...]:
    """Make the same limit for each of several keys."""
    return tuple(Limit(key, allowed, reason, where, when) for key in keys)


@dataclass(frozen=True)
class Refusal:
    """Row that refuses every value of a key if the condition holds. Its attributes are those of `Limit`."""

    key: str
    reason: Reason
    where: Scope
    when: Condition

    @property
    def rule(self) -> str:
        """The row in words, without its reason."""
        return f"{self.key} is refused"

    def message(self, recipe: Recipe) -> str | None:
        """Write a message if the condition holds, or return None."""
        if not self.when(recipe):
            return None
        return f"{_named(self.key, value_of(recipe, self.key))}: {_written(self.reason, recipe)}"


@dataclass(frozen=True)
class Number:
    """Number that is computed from a recipe.

    Attributes:
        name: Name of the number in messages.
        of: Function that computes it. It returns None if the recipe has no such number.
    """

    name: str
    of: Callable[[Recipe], int | None]


@dataclass(frozen=True)
class Kind:
    """Kind of a relation between two values, such as "divides".

    Attributes:
        text: Words between the two names in `recipe rules`, such as "must divide".
        verb: Words between the two values in the message of a violation, such as "does not divide".
        holds: Test of the two values.
        of_numbers: True if the relation is not tested where a value is null.
    """

    text: str
    verb: str
    holds: Callable[[Any, Any], bool]
    of_numbers: bool = True


def is_on(value: object) -> bool:
    """True for a setting that turns something on. Null, false, empty, 0, 1 and auto do not."""
    return value is True or value not in (None, False, 0, 1, "auto", [], {})


def _needs(first: object, second: object) -> bool:
    """True if the first setting is off, or both are on."""
    return not is_on(first) or is_on(second)


def _excludes(first: object, second: object) -> bool:
    """True unless both settings are on."""
    return not (is_on(first) and is_on(second))


DIVIDES = Kind("must divide", "does not divide", lambda a, b: b % a == 0)
IS_MULTIPLE_OF = Kind("must be a multiple of", "is not a multiple of", lambda a, b: a % b == 0)
IS_AT_MOST = Kind("must be at most", "exceeds", lambda a, b: a <= b)
IS_BELOW = Kind("must be below", "is not below", lambda a, b: a < b)
IS_AT_LEAST = Kind("must be at least", "is less than", lambda a, b: a >= b)
EQUALS = Kind("must equal", "differs from", lambda a, b: a == b, of_numbers=False)
NEEDS = Kind("needs", "needs", _needs, of_numbers=False)
EXCLUDES = Kind("excludes", "excludes", _excludes, of_numbers=False)


@dataclass(frozen=True)
class Relation:
    """Row that demands a relation between two values.

    Attributes:
        first, second: Each a dotted key, or a number that is computed from the recipe.
        kind: Relation of the first to the second.
        reason, where, when: See `Limit`.
    """

    first: str | Number
    kind: Kind
    second: str | Number
    reason: Reason
    where: Scope
    when: Condition = always

    @property
    def key(self) -> str:
        """Key of the first value, or its name if it is a computed number."""
        return self.first if isinstance(self.first, str) else self.first.name

    @property
    def rule(self) -> str:
        """The row in words, without its reason."""
        second = self.second if isinstance(self.second, str) else self.second.name
        return f"{self.key} {self.kind.text} {second}"

    def message(self, recipe: Recipe) -> str | None:
        """Write a message if the relation does not hold, or return None."""
        if not self.when(recipe):
            return None
        first = _value(recipe, self.first)
        second = _value(recipe, self.second)
        if self.kind.of_numbers and (first is None or second is None):
            return None
        if self.kind.holds(first, second):
            return None
        if self.kind is NEEDS:
            # The message names the value that is needed, true, not the present one: "a=true needs b=true".
            second_named = f"{self.second}=true"
        else:
            second_named = _named_second(self.second, second)
        return f"{_named(self.first, first)} {self.kind.verb} {second_named}: {_written(self.reason, recipe)}"


Row = Limit | Refusal | Relation


class Placeholder:
    """Replaces the recipe when a reason is printed without one, and prints keys: ``{loss_fn.variant}``."""

    def __init__(self, key: str = "") -> None:
        self._key = key

    def __getattr__(self, name: str) -> "Placeholder":
        return Placeholder(f"{self._key}.{name}" if self._key else name)

    def __format__(self, format_spec: str) -> str:
        return f"{{{self._key}}}"


def in_words(row: Row) -> str:
    """Describe a row in one line: scope, condition, rule and reason, with names in place of values."""
    condition = row.when.__name__.replace("_", " ")
    reason = _written(row.reason, cast(Recipe, Placeholder()))
    return f"{row.where.name} [{condition}] {row.rule}: {reason}"


def _written(reason: Reason, recipe: Recipe) -> str:
    return reason if isinstance(reason, str) else reason(recipe)


def _value(recipe: Recipe, name: str | Number) -> Any:
    return value_of(recipe, name) if isinstance(name, str) else name.of(recipe)


def _named(name: str | Number, value: object) -> str:
    if isinstance(name, Number):
        return f"{name.name} = {value}"
    # The whole content of a section would make the message too long.
    is_section = isinstance(value, BaseModel | Mapping)
    return f"{name}={'{..}' if is_section else as_yaml(value)}"


def _named_second(name: str | Number, value: object) -> str:
    return f"{value} ({name.name})" if isinstance(name, Number) else _named(name, value)
