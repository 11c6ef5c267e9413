"""Properties of an objective that let the engines skip work, found by running it on small steps.

If the code fails on these steps, the property gets the value that skips no work.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

from nemo_grpo.core.batch import TokenBatch
from nemo_grpo.core.lazy import Tensor, torch
from nemo_grpo.core.objective import Objective
from nemo_grpo.variants.small_steps import SEED, loss_and_gradient, loss_of, random_step, shaped_by

SPREADS = (1.0, 8.0, 64.0, 512.0)
"""Factors of the logprobs, so that thresholds of any usual size are passed on some step."""
ABOUT = ("dtype", "shape", "device", "is_cuda", "requires_grad", "layout", "ndim")
WITHOUT_VALUES = ("size", "dim", "numel", "new_zeros", "new_ones", "new_full", "new_empty", "zeros_like",
                  "ones_like", "empty_like", "full_like", "is_floating_point", "__len__")  # fmt: skip
"""Attributes and functions that use a tensor without reading its values."""


def _found(otherwise: bool) -> Callable[[Callable[["Probe"], bool]], Any]:
    """Make a cached property that is ``otherwise`` if the objective fails on a small step."""

    def of(find: Callable[["Probe"], bool]) -> Any:
        def guarded(probe: "Probe") -> bool:
            try:
                return find(probe)
            except Exception:  # of a user's own code; `variants check` names it
                return otherwise

        guarded.__doc__ = find.__doc__
        return cached_property(guarded)

    return of


class Probe:
    """Finds the properties of one objective, each on first access."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective

    @cached_property
    def steps(self) -> list[TokenBatch]:
        """Groups with and without signal, one of them with an outlier."""
        groups = [[1.0, 0.0, 0.3], [0.0, 0.0], [0.05, 1.4, 1.4, 1.4], [1.0, 1.0, 0.0], [2.0, 5.0]]
        rewards = [reward for group in groups for reward in group]
        ids = [number for number, group in enumerate(groups) for _ in group]
        lengths = [1 + 3 * row % 8 for row in range(len(rewards))]
        steps = [random_step(lengths, rewards, ids, seed, spread) for seed in range(2) for spread in SPREADS]
        return [replace(step, response_ids=torch.arange(len(ids)) * 7919) for step in steps]

    @_found(otherwise=True)
    def reads_scores(self) -> bool:
        """True if ``shape`` reads the values of the scored logprobs."""
        for step in self.steps:
            clean = step.clean()
            clean = replace(clean, next_token_logprobs=clean.prev_logprobs.clone())
            with _reads((clean.prev_logprobs, clean.next_token_logprobs)) as reads:
                self.objective.shape(clean, SEED)
            if reads:
                return True
        return False

    @_found(otherwise=True)
    def shapes_advantages(self) -> bool:
        """True if a token's advantage is not the group advantage of its response."""
        return any(
            not torch.equal(shaped.advantages, shaped.base.per_token(step.mask))
            for step in self.steps
            for shaped in [shaped_by(self.objective, step)]
        )

    @_found(otherwise=True)
    def spans_groups(self) -> bool:
        """True if a response's advantages or weights depend on other groups than its own."""
        for step in self.steps:
            together = shaped_by(self.objective, step)
            for number in step.group_ids.unique():
                rows = step.group_ids == number
                alone = shaped_by(self.objective, step.select(rows))
                if together.carried != alone.carried:
                    return True
                for name in ("advantages", "token_weights"):
                    one, two = getattr(together, name), getattr(alone, name)
                    if one is not None and not torch.allclose(one[rows], two, 1e-9, 1e-12):
                        return True
        return False

    @_found(otherwise=True)
    def learns_without_advantages(self) -> bool:
        """True if the loss has a gradient where the advantage is 0, the KL penalty's aside."""
        objective = replace(self.objective, kl_penalty=0.0)
        for step in self.steps:
            prepared = objective.prepare(step, seed=SEED)
            prepared = replace(prepared, advantages=torch.zeros_like(prepared.advantages))
            loss = loss_of(objective, prepared, step.next_token_logprobs)
            if torch.autograd.grad(loss, step.next_token_logprobs)[0].any():
                return True
        return False

    @_found(otherwise=False)
    def folds(self) -> bool:
        """True if loss and gradient are the same with all weights multiplied into the advantages.

        See `PreparedBatch.folded`.
        """
        for step in self.steps:
            loss, gradient, _ = loss_and_gradient(self.objective, step)
            folded, of_folded, _ = loss_and_gradient(self.objective, step, folded=True)
            pairs = ((loss, folded), (gradient, of_folded))
            if not all(torch.allclose(one, two, 1e-9, 1e-12) for one, two in pairs):
                return False
        return True


@contextmanager
def _reads(watched: tuple[Tensor, ...]) -> Iterator[list[Any]]:
    """Collect the functions that get one of these tensors and read its values."""
    from torch.overrides import TorchFunctionMode

    reads: list[Any] = []
    free = {getattr(torch.Tensor, name).__get__ for name in ABOUT}

    def holds(argument: Any) -> bool:
        if isinstance(argument, list | tuple):
            return any(map(holds, argument))
        return any(argument is tensor for tensor in watched)

    class Mode(TorchFunctionMode):  # a class of torch's, which is imported on first use
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = [*args, *(kwargs or {}).values()]
            if function not in free and getattr(function, "__name__", "") not in WITHOUT_VALUES:
                reads.extend([function] if holds(given) else [])
            return function(*args, **(kwargs or {}))

    with Mode():
        yield reads
