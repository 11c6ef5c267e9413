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

NO_VALUE = "no value within the limits on time and memory"
"""Error of a call without a reply; see `WorkerPool`."""

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def parameters_of(reference: str) -> tuple[str, ...]:
    """List the parameters of a function: some of `ONE`, or some of `BATCH`."""
    key = f"nemo_grpo.rewards.{reference}"
    function = extensions.load(reference, key)
    rule = (
        f"a reward function takes some of {', '.join(ONE)} and returns a number, "
        f"or some of {', '.join(BATCH)} and returns a list of numbers"
    )
    if not callable(function) or inspect.isclass(function):
        raise UserError(f"{key}: it is not a function; {rule}")
    parameters = inspect.signature(function).parameters.values()
    # A parameter with a default and another name is not passed, so any is allowed.
    names = tuple(
        parameter.name
        for parameter in parameters
        if parameter.kind in _NAMED
        and (parameter.default is parameter.empty or parameter.name in (*ONE, *BATCH))
    )
    if not names or not (set(names) <= set(ONE) or set(names) <= set(BATCH)):
        raise UserError(f"{key}({', '.join(names)}): {rule}")
    return names


class OwnReward:
    """A user's reward function, called in worker processes.

    Attributes:
        reference: the function's name in the recipe.
        parameters: names of its parameters, some of `ONE` or some of `BATCH`.
        batched: True if it takes lists (`BATCH`).
        pool: the workers.
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
        mapper: Callable[..., Any] = map,
    ) -> list[float | None]:
        """Return a number per response: None if the function abstains, NaN if it failed (logged).

        Args:
            prompts: user message of each response.
            responses: the responses.
            problems: problem of each response.
            mapper: ``map``, or a function like it that makes the calls in parallel.
        """
        if not responses:
            return []
        values, errors = self._values(prompts, responses, problems, mapper)
        if errors:
            log.warning(
                "nemo_grpo.rewards.%s failed for %d of %d responses, which get 0 for it: %s",
                self.reference,
                sum(map(_is_nan, values)),
                len(values),
                errors[0],
            )
        return values

    def try_on(self, prompt: str, responses: Sequence[str], problem: Problem) -> None:
        """Call the function on responses to a problem: on each, or on the list if it takes lists."""
        if self.batched:
            self._try_call(prompt, list(responses), problem)
            return
        for response in responses:
            self._try_call(prompt, [response], problem)

    def _try_call(self, prompt: str, responses: list[str], problem: Problem) -> None:
        count = len(responses)
        values, errors = self._values([prompt] * count, responses, [problem] * count)
        not_finite = [str(value) for value in values if value is not None and not math.isfinite(value)]
        failures = errors + not_finite
        if not failures:
            return
        if self.batched:
            arguments = f"the responses {responses}"
            scope = "each response of the list"
        else:
            arguments = f"the response {responses[0]!r}"
            scope = "any response"
        raise UserError(
            f"nemo_grpo.rewards.{self.reference}: {failures[0]}, for {arguments} to problem {problem.id!r}; "
            f"return a finite number, or None to abstain, for {scope}"
        )

    def _values(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        problems: Sequence[Problem],
        mapper: Callable[..., Any] = map,
    ) -> tuple[list[float | None], list[str]]:
        """Return a value per response, and the errors of calls that failed."""
        if self.batched:
            arguments = dict(zip(BATCH, (prompts, responses, problems), strict=True))
            return self._ask(arguments, len(responses))

        def ask_about_one(row: tuple[str, str, Problem]) -> tuple[list[float | None], list[str]]:
            return self._ask(dict(zip(ONE, row, strict=True)), None)

        all_values: list[float | None] = []
        all_errors: list[str] = []
        for values, errors in mapper(ask_about_one, zip(prompts, responses, problems, strict=True)):
            all_values += values
            all_errors += errors
        return all_values, all_errors

    def _ask(self, arguments: dict[str, Any], count: int | None) -> tuple[list[float | None], list[str]]:
        """Call the function in a worker; returns (values, errors).

        Args:
            arguments: name -> value of each argument that a function may take.
            count: number of responses of a list; None: one response.
        """
        num_responses = 1 if count is None else count
        parameters = {name: arguments[name] for name in self.parameters}
        reply = self.pool.ask((parameters, count), num_responses)
        if not reply:
            return [math.nan] * num_responses, [NO_VALUE]
        result = json.loads(reply)
        if "error" in result:
            return [math.nan] * num_responses, [result["error"]]
        return list(result["values"]), []


def _is_nan(value: float | None) -> bool:
    return value is not None and math.isnan(value)
