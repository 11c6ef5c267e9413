"""Checks that every loss must pass, by name, on small made-up steps.

``nemo-grpo variants check``, the start of a run with an own loss, and the variants' tests run them. `sanity`
checks that a loss is well formed, `invariance` that it does not depend on how a step is split.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from pydantic import ValidationError

from nemo_grpo.core.batch import TokenBatch
from nemo_grpo.core.lazy import Tensor, torch
from nemo_grpo.core.objective import Objective
from nemo_grpo.support.errors import UserError, did_you_mean
from nemo_grpo.support.extensions import place_of
from nemo_grpo.variants.base import VariantConfig
from nemo_grpo.variants.checking import declarations, invariance, sanity
from nemo_grpo.variants.checking.small_steps import example_step, random_step


class Failure(NamedTuple):
    """A check that does not hold. Its sentence says what was expected, what was found, and the remedy."""

    check: str
    sentence: str


class Case(NamedTuple):
    """Input of a check.

    Attributes:
        config: the variant.
        objective: its loss.
        batch: a step, without the tensors that the variant does not declare.
        undeclared: the tensors that were left out: field of the batch -> (declaration that would ask for it,
            its values).
    """

    config: VariantConfig
    objective: Objective
    batch: TokenBatch
    undeclared: dict[str, tuple[str, Tensor]]


Check = Callable[[Case], "str | None"]

FIRST: dict[str, Check] = {
    "repetition": lambda c: sanity.gives_the_same_again(c.objective, c.batch),
    "names": lambda c: sanity.names_are_known(c.config),
    "shapes": lambda c: sanity.shapes_fit(c.objective, c.batch),
    "gradient": lambda c: sanity.has_a_gradient(c.objective, c.batch),
}
"""Checks that come first; the first one that fails ends the checking."""

FURTHER: dict[str, Check] = {
    "finite": lambda c: sanity.is_finite(c.objective, c.batch),
    "sign": lambda c: sanity.moves_the_right_way(c.config, c.objective, c.batch),
    "microbatches": lambda c: invariance.adds_up(c.objective, c.batch, _single_rows(c.batch)),
    "order": lambda c: invariance.ignores_order(c.objective, c.batch, _order(c.batch)),
    "padding": lambda c: invariance.ignores_padding(c.objective, c.batch, 2, 3),
    "packing": lambda c: invariance.survives_packing(c.objective, c.batch),
    "masked garbage": lambda c: invariance.ignores_what_is_masked(c.objective, c.batch, float("nan")),
    "metrics": lambda c: invariance.metrics_add_up(c.objective, c.batch),
    "no tokens": lambda c: invariance.is_zero_without_tokens(c.objective, c.batch),
    "precision": lambda c: invariance.keeps_dtype(c.objective, c.batch),
    "declarations": lambda c: declarations.are_true(c.config, c.objective, c.batch),
    "differences": lambda c: invariance.agrees_with_differences(c.objective, c.batch),
}
CHECKS = (*FIRST, *FURTHER)
"""Names of all checks, in their order."""


def check_variant(config: VariantConfig, *, quick: bool = False) -> list[Failure]:
    """Run the checks. An exception in the variant's code is a failure.

    Args:
        config: the variant.
        quick: check on one step, in a tenth of a second; else on nine.
    Returns: the checks that fail, each with its first sentence.
    """
    objective = config.build()
    failures = dict[str, Failure]()
    for batch in _steps(quick):
        step, undeclared = sanity.declared_inputs(config, batch)
        case = Case(config, objective, step, undeclared)
        for name, check in (FIRST | FURTHER).items():
            if name in failures:
                continue
            sentence = _sentence(check, case)
            if sentence is None:
                continue
            failures[name] = Failure(name, sentence)
            if name in FIRST:
                return [failures[name]]
    return [failures[name] for name in CHECKS if name in failures]


def try_out(config: VariantConfig, key: str) -> None:
    """Run the quick checks before a run, and refuse a loss that fails."""
    failures = check_variant(config, quick=True)
    if not failures:
        return
    # An error message has room for two failures. The command that it names prints all of them.
    summary = "; ".join(f"{check}: {sentence}" for check, sentence in failures[:2])
    if len(failures) > 2:
        summary += f" ({len(failures)} checks fail)"
    raise UserError(f"{key}={config.variant}: {summary}; try `nemo-grpo variants check {config.variant}`")


def _steps(quick: bool) -> Iterator[TokenBatch]:
    yield example_step()
    if quick:
        return
    for seed in range(3):
        yield example_step(seed)
        yield random_step([5, 3, 6, 2, 4, 1], [1.0, 0.0, 0.3, 1.0, 0.0, 0.0], [4, 4, 4, -2, -2, -2], seed)
    # Two groups, each with one reward apart from equal ones.
    rewards = [0.05] + [1.4] * 7 + [10.0] + [-3.3] * 3
    yield random_step([2] * 12, rewards, [3] * 8 + [9] * 4)
    rows_left_out = torch.tensor([True, False, True, True, True])
    yield replace(example_step(seed=9), sample_mask=rows_left_out)


def _single_rows(batch: TokenBatch) -> tuple[Tensor, ...]:
    """Split a step into microbatches of one row each."""
    return torch.arange(len(batch.rewards)).split(1)


def _order(batch: TokenBatch) -> Tensor:
    """Draw an order of the rows, the same in every process."""
    return torch.randperm(len(batch.rewards), generator=torch.Generator().manual_seed(3))


def _sentence(check: Check, case: Case) -> str | None:
    """Run a check: None if it holds, else its sentence. An exception is reported as a failure."""
    try:
        return check(case)
    except Exception as error:  # of the variant's own code, whatever it raises
        file = getattr(sys.modules.get(type(case.config).__module__), "__file__", None)
        return f"expected a loss; found {place_of(error, file)}{_hint(error, check, case)}"


def _hint(error: Exception, check: Check, case: Case) -> str:
    """Guess the cause of an exception in a variant's code, as the end of a sentence; "" without a guess."""
    if isinstance(error, ValidationError) and any(
        details["type"] == "frozen_instance" for details in error.errors()
    ):
        return "; a variant keeps nothing on self; Shaped.carried hands numbers to the next step"
    if isinstance(error, AttributeError) and error.name and error.obj is not None:
        return did_you_mean(error.name, [name for name in dir(error.obj) if not name.startswith("_")])
    # A check that passes once a tensor is there failed because the tensor was missing.
    for field, (declaration, value) in case.undeclared.items():
        additional: dict[str, Any] = {field: value}
        try:
            check(case._replace(batch=replace(case.batch, **additional)))
        except Exception:  # another input is missing
            continue
        return f"; it reads {field}, which are given with {declaration} = True only"
    return ""
