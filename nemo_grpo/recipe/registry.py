"""Scopes of the rules about recipes, and the rules that are functions.

A rule is a row of a table (see `rows`) or, where it needs arithmetic or a look-up, a function that yields one
message ``key=value: rule; remedy`` per violation, registered by ``@rule(scope)`` in `rules`, `rules_advice`,
`rules_embedded`, `cluster_rules`, `host` and `nemo_grpo.plan.rules`.
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
"""Scope -> name -> rule, in the order of their messages."""


def rule(scope: Scope) -> Callable[[Check], Check]:
    """Register a function as a rule."""

    def register(check: Check) -> Check:
        # By name, so that a test can run one rule alone and prove that each is broken by some recipe.
        RULES[scope][check.__name__] = check
        return check

    return register


def messages(scope: Scope, *subject: Any) -> list[str]:
    """List the messages of a scope's rule functions, called with the subject as arguments."""
    return [message for check in RULES[scope].values() for message in check(*subject)]
