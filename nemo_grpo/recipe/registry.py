"""Scopes of the rules about recipes, and the rules that are functions.

Most rules are rows of a table (see `rows`). A rule that needs arithmetic or a look-up is a function, which
yields a message ``key=value: rule; remedy`` for each violation. ``@rule(scope)`` registers such functions in
`rules`, `rules_advice`, `rules_embedded`, `cluster_rules`, `host` and `nemo_grpo.plan.rules`.
"""

from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import Any


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
    ADVICE = auto()
    """Every recipe; a warning only."""
    SHAPE = auto()
    """A model's shape and a layout."""
    MEMORY = auto()
    """A model's shape, a layout and a GPU's memory; checked only if every SHAPE rule holds."""


Check = Callable[..., Iterator[str]]

RULES: dict[Scope, dict[str, Check]] = {scope: {} for scope in Scope}
"""Rule functions by scope and name, in the order of their messages."""


def rule(scope: Scope) -> Callable[[Check], Check]:
    """Register a function as a rule."""

    def register(check: Check) -> Check:
        # Rules are kept by name, so that a test can run each of them alone on a recipe that breaks it.
        RULES[scope][check.__name__] = check
        return check

    return register


def messages(scope: Scope, *subject: Any) -> list[str]:
    """Call the rule functions of a scope on a subject, such as a recipe, and list their messages."""
    return [message for check in RULES[scope].values() for message in check(*subject)]
