"""Rules on recipes: their scopes, those that are functions, and the tables limits.yaml and relations.yaml.

A rule is a row of a table or, where it needs arithmetic or a look-up, a function that yields one message
``key=value: rule; remedy`` per violation, registered by ``@rule(scope)`` in `rules`, `cluster_rules` and
`nemo_grpo.plan.rules`.

A table has scopes, contexts, and rows with their reasons. A context is ``always``, or terms joined by
`` and ``: a dotted name of the recipe, which must be neither null, false nor empty; ``not`` before it;
``=value`` after it. A row of the limits is ``keys in [values]``, ``keys within [items]``, or ``keys is`` one
of `CONDITIONS`; a row of the relations is ``key`` one of `KINDS` ``key``. A reason ends with the remedy; a
name in braces is the recipe's, such as ``{0.run_dir}``.
"""

from collections.abc import Callable, Iterator, Mapping
from enum import Enum, auto
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel

from nemo_grpo.support.dotted import value_of
from nemo_grpo.support.errors import as_yaml


class Scope(Enum):
    """Recipes that a rule applies to."""

    ALL = auto()
    """Every recipe, when it is loaded."""
    CLUSTER = auto()
    """Recipes with ``nemo_grpo.target: cluster``, when they are loaded."""
    MEGATRON = auto()
    """As CLUSTER, if Megatron-core trains them (``policy.megatron_cfg.enabled``)."""
    CARE = auto()
    """As CLUSTER, for settings that NeMo-RL accepts at the cost of checkpoints, accuracy or rounding: errors
    in a recipe with a task, warnings in NeMo-RL's own, whose users may have chosen them."""
    EMBEDDED = auto()
    """Recipes for the embedded engine."""
    V0_7_0 = auto()
    """Recipes for NeMo-RL 0.7.0, before they run."""
    CPU = auto()
    """Recipes for NeMo-RL on a machine without a GPU; a limit's last value replaces any that it excludes."""
    REHEARSAL = auto()
    """As CPU, with a small model and few steps."""
    ADVICE = auto()
    """Every recipe; a warning only."""
    SHAPE = auto()
    """A model's shape and a layout."""
    MEMORY = auto()
    """A model's shape, a layout and a GPU's memory; checked only if every SHAPE rule holds."""


Check = Callable[..., Iterator[str]]

RULES: dict[Scope, dict[str, Check]] = {scope: {} for scope in Scope}
"""Scope -> name -> rule, in the order of their messages."""


def rule(scope: Scope) -> Callable[[Check], Check]:
    """Register a function as a rule."""

    def register(check: Check) -> Check:
        RULES[scope][check.__name__] = check
        return check

    return register


def messages(scope: Scope, *subject: Any) -> list[str]:
    """List the messages of a scope's rule functions, called with the subject as arguments."""
    return [message for check in RULES[scope].values() for message in check(*subject)]


FILES = ("limits.yaml", "relations.yaml")

CONDITIONS: dict[str, Callable[[Any], bool]] = {
    "2 or more": lambda value: value >= 2,
    "above 0": lambda value: bool(value) and value > 0,
    "not empty": bool,
    "not null": lambda value: value is not None,
    "of training": lambda metric: (metric or "train:").startswith("train:"),
    "of training or validation": lambda metric: (metric or "val:").startswith(("val:", "train:")),
    "of validation": lambda metric: not (metric or "").startswith("train:"),
}
"""Condition -> its test; a null metric meets those on metrics."""


class Kind(NamedTuple):
    """Relation that two values must have.

    Attributes: verb: for a message that it does not hold.  holds: test of the two values.
    """

    verb: str
    holds: Callable[[Any, Any], bool]


KINDS = {
    "divides": Kind("does not divide", lambda a, b: b % a == 0),
    "is a multiple of": Kind("is not a multiple of", lambda a, b: a % b == 0),
    "equals": Kind("differs from", lambda a, b: a == b),
    "is at most": Kind("exceeds", lambda a, b: a <= b),
    "is below": Kind("is not below", lambda a, b: a < b),
    "is at least": Kind("is less than", lambda a, b: a >= b),
    "needs": Kind("needs", lambda a, b: not is_on(a) or is_on(b)),
    "excludes": Kind("excludes", lambda a, b: not (is_on(a) and is_on(b))),
}
NUMERIC = ("divides", "is a multiple of", "is at most", "is below", "is at least")
"""Relations that are skipped if a value is null."""

DERIVED = {
    "chunk_unit": "ranks x sequences of a microbatch",
    "model_parallel_size": "TP x PP x CP",
    "nemo_grpo.new_model.width_unit": "2 x num_attention_heads",
    "num_expert_ranks": "policy.megatron_cfg.expert_model_parallel_size x expert_tensor_parallel_size",
    "num_groups_ahead": "groups that rollouts may be ahead",
    "num_sequences_per_microbatch": "data-parallel ranks x policy.train_micro_batch_size, or 1 with packing",
    "num_sequences_per_rank": "sequences of a step on a data-parallel rank",
    "num_sequences_per_step": "grpo.num_prompts_per_step x grpo.num_generations_per_prompt",
    "num_stage_ranks": "ranks of a pipeline stage",
    "policy.layout.sequence_multiple": "2 CP, times TP with sequence_parallel",
    "world_size": "cluster.gpus_per_node x cluster.num_nodes, less separate rollouts,",
}
"""Number derived from a recipe -> its name in messages."""


class Limit(NamedTuple):
    """A row of limits.yaml: in a context, a key must have one of some values.

    Attributes: values: the listed ones; none for a condition.  rule: the row's text.
    """

    context: str
    key: str
    allows: Callable[[Any], bool]
    values: tuple[Any, ...]
    rule: str
    reason: str

    def message(self, recipe: Any) -> str | None:
        """Write the value that is not allowed, and why; None if the limit holds."""
        value = value_of(recipe, self.key)
        is_listed = bool(self.values) and self.allows(value)  # first: a context may have to run the loss
        if is_listed or not meets(recipe, self.context) or self.allows(value):
            return None
        return f"{_named(self.key, value)}: {self.reason.format(recipe)}"


class Relation(NamedTuple):
    """A row of relations.yaml: in a context, the values of two keys or derived numbers must relate."""

    context: str
    key: str
    kind: str
    other: str
    reason: str

    @property
    def rule(self) -> str:
        """The row's text."""
        return f"{self.key} {self.kind} {self.other}"

    def message(self, recipe: Any) -> str | None:
        """Write both values, and why they must relate; None if they do."""
        if not meets(recipe, self.context):
            return None
        a, b = value_of(recipe, self.key), value_of(recipe, self.other)
        if (self.kind in NUMERIC and (a is None or b is None)) or KINDS[self.kind].holds(a, b):
            return None
        wanted = f"{b} ({DERIVED[self.other]})" if self.other in DERIVED else _named(self.other, b)
        wanted = f"{self.other}=true" if self.kind == "needs" else wanted
        return f"{_named(self.key, a)} {KINDS[self.kind].verb} {wanted}: {self.reason.format(recipe)}"


Row = Limit | Relation


@cache
def rows(scope: Scope) -> tuple[Row, ...]:
    """List the rows of both tables, in the order of their messages."""
    return tuple(
        row
        for name in FILES
        for context, rules in (_table(name).get(scope.name) or {}).items()
        for rule, reason in rules.items()
        for row in _parsed("" if context == "always" else context, rule, reason)
    )


def table_messages(scope: Scope, recipe: Any) -> list[str]:
    """List a message for each row that a recipe breaks."""
    return [message for row in rows(scope) if (message := row.message(recipe))]


@cache
def _table(name: str) -> dict[str, dict[str, dict[str, str]]]:
    text = resources.files("nemo_grpo.recipe").joinpath(name).read_text(encoding="utf-8")
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def _parsed(context: str, rule: str, reason: str) -> Iterator[Row]:
    for kind in KINDS:
        key, separator, other = rule.partition(f" {kind} ")
        if separator:
            yield Relation(context, key, kind, other, reason)
            return
    for word in ("in", "within", "is"):
        keys, separator, text = rule.partition(f" {word} ")
        if separator:
            values = () if word == "is" else tuple(yaml.safe_load(text))
            for key in keys.split(", "):
                yield Limit(context, key, _test(word, text, values), values, f"{key} {word} {text}", reason)
            return
    raise ValueError(f"{rule!r} is no limit and no relation")


def _test(word: str, text: str, values: tuple[Any, ...]) -> Callable[[Any], bool]:
    if word == "is":
        return CONDITIONS[text]
    return values.__contains__ if word == "in" else lambda value: all(item in values for item in value or ())


def _named(key: str, value: object) -> str:
    if key in DERIVED:
        return f"{DERIVED[key]} = {value}"
    return f"{key}={'{..}' if isinstance(value, BaseModel | Mapping) else as_yaml(value)}"


def is_on(value: object) -> bool:
    """True for a setting in use: not null, false, empty, 0, 1 or auto."""
    return value is True or value not in (None, False, 0, 1, "auto", [], {})


def meets(recipe: Any, context: str) -> bool:
    """True if a recipe meets every term of a context."""
    return all(_holds(recipe, term) for term in context.split(" and ") if term)


def _holds(recipe: Any, term: str) -> bool:
    name, separator, wanted = term.removeprefix("not ").partition("=")
    value = value_of(recipe, name)
    return (as_yaml(value) == wanted if separator else bool(value)) != term.startswith("not ")
