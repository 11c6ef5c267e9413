"""A user's function as a component of the reward: ``nemo_grpo.rewards: {my_rewards.py:length_bonus: 0.1}``.

It runs in a worker process under the limits of the mathematics grader, the same on both engines.
"""

import inspect
import json
import logging
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

from nemo_grpo.support import extensions
from nemo_grpo.support.errors import UserError
from nemo_grpo.tasks.base import Problem
from nemo_grpo.tasks.rewards.worker_pool import WorkerPool

log = logging.getLogger(__name__)

ONE = ("prompt", "response", "problem")
"""Parameters of a function that scores one response; it may take any of them."""
BATCH = ("prompts", "responses", "problems")
"""Parameters of a function that scores a list of responses and returns a list of numbers."""

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def parameters_of(reference: str) -> tuple[str, ...]:
    """List the parameters of a function: some of `ONE`, or some of `BATCH`."""
    key = f"nemo_grpo.rewards.{reference}"
    function = extensions.load(reference, key)
    rule = f"a reward function takes some of {', '.join(ONE)} and returns a number, or some of " + (
        f"{', '.join(BATCH)} and returns a list of numbers"
    )
    if not callable(function) or inspect.isclass(function):
        raise UserError(f"{key}: it is not a function; {rule}")
    named = [p for p in inspect.signature(function).parameters.values() if p.kind in _NAMED]
    names = tuple(p.name for p in named if p.default is p.empty or p.name in (*ONE, *BATCH))
    if not names or not (set(names) <= set(ONE) or set(names) <= set(BATCH)):
        raise UserError(f"{key}({', '.join(names)}): {rule}")
    return names


class OwnReward:
    """One function and its workers.

    Attributes: reference: its name in the recipe.  batched: it takes lists.
    """

    def __init__(self, reference: str) -> None:
        self.reference = reference
        self.parameters = parameters_of(reference)
        self.batched = self.parameters[0] in BATCH
        self.pool = WorkerPool(
            ("own_function", sys.path, extensions.texts_of([reference]), reference),
            f"the worker of nemo_grpo.rewards.{reference} did not start; its messages are above",
            prints=True,
        )

    def __call__(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        problems: Sequence[Problem],
        each: Callable[..., Any] = map,
    ) -> list[float | None]:
        """Return a number per response; None where the function abstains, NaN where it failed (logged).

        Args: each: ``map``, or one that calls in parallel.
        """
        if not responses:
            return []
        values, errors = self._values(prompts, responses, problems, each)
        if errors:
            log.warning(
                "nemo_grpo.rewards.%s failed for %d of %d responses, which get 0 for it: %s",
                *(self.reference, sum(map(_is_nan, values)), len(values), errors[0]),
            )
        return values

    def try_on(self, prompt: str, responses: Sequence[str], problem: Problem) -> None:
        """Call the function on responses to a problem: on each, or on the list if it takes lists."""
        for tried in [list(responses)] if self.batched else [[response] for response in responses]:
            count = len(tried)
            values, errors = self._values([prompt] * count, tried, [problem] * count)
            wrong = next((one for one in values if one is not None and not math.isfinite(one)), None)
            if errors or wrong is not None:
                what = f"the responses {tried}" if self.batched else f"the response {tried[0]!r}"
                raise UserError(
                    f"nemo_grpo.rewards.{self.reference}: {errors[0] if errors else wrong}, for {what} to "
                    f"problem {problem.id!r}; return a finite number, or None to abstain, for "
                    f"{'each response of the list' if self.batched else 'any response'}"
                )

    def _values(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        problems: Sequence[Problem],
        each: Callable[..., Any] = map,
    ) -> tuple[list[float | None], list[str]]:
        if self.batched:
            given = dict(zip(BATCH, (prompts, responses, problems), strict=True))
            return self._ask(given, len(responses))
        rows = zip(prompts, responses, problems, strict=True)
        replies = list(each(lambda row: self._ask(dict(zip(ONE, row, strict=True)), None), rows))
        return [v for values, _ in replies for v in values], [e for _, errors in replies for e in errors]

    def _ask(self, given: dict[str, Any], count: int | None) -> tuple[list[float | None], list[str]]:
        """Return (values, errors); ``count`` None: one response."""
        reply = self.pool.ask(({name: given[name] for name in self.parameters}, count), count or 1)
        found = json.loads(reply) if reply else {"error": "no value within the limits on time and memory"}
        if "error" in found:
            return [math.nan] * (count or 1), [found["error"]]
        return list(found["values"]), []


def _is_nan(value: float | None) -> bool:
    return value is not None and math.isnan(value)
