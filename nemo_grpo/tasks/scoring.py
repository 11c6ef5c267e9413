"""The reward of a response: the task's components and the user's own functions, weighted by the recipe."""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from nemo_grpo.support import extensions
from nemo_grpo.tasks.base import NOT_FINITE, Problem, Task, reward_of
from nemo_grpo.tasks.grading import checked_score
from nemo_grpo.tasks.prompts import Prompt, chat_messages, first_words
from nemo_grpo.tasks.response import render_response
from nemo_grpo.tasks.rewards.own_reward import OwnReward

FEW = 3
"""Failed rewards that a step tolerates whatever `Scorer.max_failed` is."""
ABSTAINED = "abstained"
"""Metric: share of responses with a reward that abstains."""
NUM_TRIED = 4
"""Problems on which own reward functions are tried before a run."""


class RewardsFailed(RuntimeError):
    """Too many rewards of a step had no finite value."""


class Scorer:
    """Components and rewards of responses.

    Attributes: task: gives the components that it declares.  weights: ``nemo_grpo.rewards``.
                max_failed: ``nemo_grpo.max_failed_rewards``.  first_words: of every response that is scored.
    """

    def __init__(
        self, task: Task, weights: Mapping[str, float], prompt: Prompt, max_failed: float = 1.0
    ) -> None:
        self.max_failed = max_failed
        self.task, self.weights, self.prompt = task, weights, prompt
        self.first_words = first_words(prompt, getattr(task, "config", None))
        self.own = [OwnReward(name) for name in weights if extensions.is_reference(name)]

    def __call__(
        self, problems: Sequence[Problem], responses: Sequence[str], each: Callable[..., Any] = map
    ) -> list[dict[str, float]]:
        """Score responses; a component that is not finite is 0 and marked by `NOT_FINITE`.

        A component of an own function that abstains is NaN.

        Args:   each: ``map``, or one that calls in parallel.
        Raises: RewardsFailed: more than `FEW` and the share ``max_failed`` are without one.
        """
        rows: list[dict[str, float]] = list(
            each(lambda pair: checked_score(self.task, *pair), zip(problems, responses, strict=True))
        )
        prompts = [self._text(problem) for problem in problems] if self.own else []
        for function in self.own:
            values = function(prompts, responses, problems, each)
            rows = [
                row | _component(function.reference, value) for row, value in zip(rows, values, strict=True)
            ]
        failed = sum(NOT_FINITE in row for row in rows)
        if failed > max(FEW, self.max_failed * len(rows)):
            raise RewardsFailed(
                f"the rewards of {failed} of {len(rows)} responses failed, as the log says; correct the "
                f"function and resume, or raise nemo_grpo.max_failed_rewards={self.max_failed} and let them "
                "count as 0"
            )
        return rows

    def reward(self, scores: Mapping[str, float]) -> float:
        """Weight a response's components; NaN: see `reward_of`."""
        return reward_of(scores, self.weights)

    def try_out(self, seed: int) -> None:
        """Call each own function on a few training problems, with an empty, short and correct response."""
        for number in range(NUM_TRIED if self.own else 0):
            problem = self.task.train_problem(number, seed)
            for function in self.own:
                responses = ("", problem.answer, render_response("so", problem.answer))
                function.try_on(self._text(problem), responses, problem)

    def close(self) -> None:
        """End the workers of own functions."""
        for function in self.own:
            function.pool.close()

    def _text(self, problem: Problem) -> str:
        """Return the prompt of own functions: the user's message, without the chat template's marks."""
        return chat_messages(self.prompt, problem)[-1]["content"]


def component_means(scores: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average each component over the responses that have it, and count those that failed or abstain."""
    columns = {name: [one.get(name, 0.0) for one in scores] for name in (*scores[0], NOT_FINITE)}
    columns[ABSTAINED] = [float(any(map(math.isnan, one.values()))) for one in scores]
    given = {name: [value for value in column if not math.isnan(value)] for name, column in columns.items()}
    return {f"reward/{name}": fmean(values) for name, values in given.items() if values}


def validation_rewards(
    scores: Sequence[Mapping[str, float]], weights: Mapping[str, float]
) -> dict[str, float]:
    """Average the reward, as ``reward``, and each component over the responses that have it.

    Args: scores: components of each response to a validation set.  weights: ``nemo_grpo.rewards``.
    """
    means = {name.removeprefix("reward/"): mean for name, mean in component_means(scores).items()}
    for name in (NOT_FINITE, ABSTAINED):
        means.pop(name, None)
    rewards = [reward_of(row, weights) for row in scores]
    given = [reward for reward in rewards if not math.isnan(reward)]
    return means | ({"reward": fmean(given)} if given else {})


def over_sets(sets: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Name each validation set's metrics ``<set>/<metric>``, and add their means over the sets, ``<metric>``.

    Standard errors (``_stderr``) give the error of the mean. A single set's metrics keep their names.
    """
    if len(sets) == 1:
        return dict(*sets.values())
    found = {f"{name}/{metric}": value for name, metrics in sets.items() for metric, value in metrics.items()}
    for metric in dict.fromkeys(metric for metrics in sets.values() for metric in metrics):
        values = [metrics[metric] for metrics in sets.values() if metric in metrics]
        total = math.hypot(*values) if metric.endswith("_stderr") else sum(values)
        found[metric] = total / len(values)
    return found


def right_and_wrong(groups: Sequence[Sequence[Mapping[str, float]]]) -> dict[str, float]:
    """Compute the shares of groups in which every response is right, and in which every one is wrong."""
    accuracies = [[scores["accuracy"] for scores in group] for group in groups]
    return {
        "rollout/all_right": sum(min(values) >= 1 for values in accuracies) / len(groups),
        "rollout/all_wrong": sum(max(values) <= 0 for values in accuracies) / len(groups),
    }


def reward_metrics(
    trained: Sequence[Sequence[Mapping[str, float]]], drawn: Sequence[Sequence[Mapping[str, float]]]
) -> dict[str, float]:
    """Compute a step's ``reward/*`` and ``rollout/all_*``, on either engine.

    Args: trained: groups of the step, of which the rewards are means.  drawn: all groups drawn for it.
    """
    return component_means([scores for group in trained for scores in group]) | right_and_wrong(drawn)


def _component(name: str, value: float | None) -> dict[str, float]:
    if value is None:
        return {name: math.nan}
    return {name: value} if math.isfinite(value) else {name: 0.0, NOT_FINITE: 1.0}
