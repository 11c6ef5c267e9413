"""Rules: a recipe that contradicts itself or would not train what it says is refused before any allocation.

A rule about one section is a method of its class, see `section_rule`. Every other rule is a function that
yields one message ``key=value: rule; remedy`` per violation, registered by ``@rule(scope)``:

- `rules`: across sections, for both engines; and advice
- `cluster_rules`, `rollout_rules`, `saving_rules`: what NeMo-RL refuses late or does wrongly, for
  ``nemo_grpo.target: cluster``
- `controller_rules`: where NeMo-RL trains past its driver, and beside it
- `demonstration_rules`: supervised training, for both engines
- `embedded_rules`: what the embedded engine cannot train
- `nemo_grpo.plan.rules`: what needs the model's shape and the GPU

`tests/contract/test_rules.py` breaks each rule with a recipe.
"""

from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import Any


class Scope(Enum):
    """What a rule applies to."""

    ALL = auto()
    """Every recipe, when it is loaded."""
    CLUSTER = auto()
    """Recipes with ``nemo_grpo.target: cluster``, when they are loaded."""
    MEGATRON = auto()
    """The same, if Megatron-core trains them (``policy.megatron_cfg.enabled``)."""
    CARE = auto()
    """As CLUSTER, for what NeMo-RL carries out with a loss of something: checkpoints, accuracy, rounding. An
    error in a recipe with a task; a warning in NeMo-RL's own, whose users may have chosen it."""
    EMBEDDED = auto()
    """Recipes for the embedded engine."""
    ADVICE = auto()
    """Every recipe; a warning only."""
    SHAPE = auto()
    """A model's shape and a layout."""
    MEMORY = auto()
    """The same, and a GPU's memory; checked only if every SHAPE rule holds."""


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
    """Messages of all rules of a scope about a subject, the rules' arguments."""
    return [message for check in RULES[scope].values() for message in check(*subject)]
