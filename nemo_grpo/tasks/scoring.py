"""Rewards of responses: the task's components and the user's own functions, weighted by the recipe."""

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
"""Number of failed rewards that every step tolerates, whatever `Scorer.max_failed` is."""
ABSTAINED = "abstained"
"""Metric: share of responses with a reward that abstains."""
NUM_TRIED = 4
"""Problems on which own reward functions are tried before a run."""


class RewardsFailed(RuntimeError):
    """Too many rewards of a step had no finite value."""


class Scorer:
    """Components and rewards of responses.

    Attributes:
        task: gives the components that it declares.
        weights: ``nemo_grpo.rewards``.
        prompt: the recipe's.
        max_failed: ``nemo_grpo.max_failed_rewards``, a share of a step's responses.
        first_words: first words of every response that is scored.
        own_rewards: the user's functions among the weights.
    """

    def __init__(
        self, task: Task, weights: Mapping[str, float], prompt: Prompt, max_failed: float = 1.0
    ) -> None:
        self.task = task
        self.weights = weights
        self.prompt = prompt
        self.max_failed = max_failed
        self.first_words = first_words(prompt, getattr(task, "config", None))
        self.own_rewards = [OwnReward(name) for name in weights if extensions.is_reference(name)]

    def __call__(
        self, problems: Sequence[Problem], responses: Sequence[str], mapper: Callable[..., Any] = map
    ) -> list[dict[str, float]]:
        """Score responses.

        A component without a finite value becomes 0, and the scores are marked by `NOT_FINITE`. The component
        of an own function that abstains is NaN.

        Args:
            problems: problem of each response.
            responses: the responses.
            mapper: ``map``, or a function like it that makes the calls in parallel.

        Raises:
            RewardsFailed: more than `FEW` responses, and more than the share ``max_failed``, have a reward
                that failed.
        """

        def score(pair: tuple[Problem, str]) -> dict[str, float]:
            return checked_score(self.task, *pair)

        rows: list[dict[str, float]] = list(mapper(score, zip(problems, responses, strict=True)))
        if self.own_rewards:
            prompts = [self._user_message(problem) for problem in problems]
            for own_reward in self.own_rewards:
                values = own_reward(prompts, responses, problems, mapper)
                components = [_component(own_reward.reference, value) for value in values]
                rows = [row | component for row, component in zip(rows, components, strict=True)]
        num_failed = sum(NOT_FINITE in row for row in rows)
        # Tolerate a few failures in any step, because the share of a small step is less than one response.
        if num_failed > max(FEW, self.max_failed * len(rows)):
            raise RewardsFailed(
                f"the rewards of {num_failed} of {len(rows)} responses failed, as the log says; correct the "
                f"function and resume, or raise nemo_grpo.max_failed_rewards={self.max_failed} and let them "
                "count as 0"
            )
        return rows

    def reward(self, scores: Mapping[str, float]) -> float:
        """Weight a response's components; see `reward_of` for NaN."""
        return reward_of(scores, self.weights)

    def try_out(self, seed: int) -> None:
        """Call each own function on a few training problems, with an empty, short and correct response."""
        if not self.own_rewards:
            # Return before the first problem is read, because the task may have no training problems.
            return
        for number in range(NUM_TRIED):
            problem = self.task.train_problem(number, seed)
            responses = ("", problem.answer, render_response("so", problem.answer))
            for own_reward in self.own_rewards:
                own_reward.try_on(self._user_message(problem), responses, problem)

    def close(self) -> None:
        """End the workers of own functions."""
        for own_reward in self.own_rewards:
            own_reward.pool.close()

    def _user_message(self, problem: Problem) -> str:
        """Return the text that own functions get as prompt: the user's message without the chat template."""
        return chat_messages(self.prompt, problem)[-1]["content"]


def component_means(scores: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average each component over the responses that have it, and count those that failed or abstain."""
    columns = {name: [row.get(name, 0.0) for row in scores] for name in (*scores[0], NOT_FINITE)}
    columns[ABSTAINED] = [float(any(map(math.isnan, row.values()))) for row in scores]
    means: dict[str, float] = {}
    for name, column in columns.items():
        values = [value for value in column if not math.isnan(value)]
        if values:
            means[f"reward/{name}"] = fmean(values)
    return means


def validation_rewards(
    scores: Sequence[Mapping[str, float]], weights: Mapping[str, float]
) -> dict[str, float]:
    """Average the reward, as ``reward``, and each component over the responses that have it.

    Args:
        scores: components of each response to a validation set.
        weights: ``nemo_grpo.rewards``.
    """
    means = {name.removeprefix("reward/"): mean for name, mean in component_means(scores).items()}
    for name in (NOT_FINITE, ABSTAINED):
        means.pop(name, None)
    all_rewards = [reward_of(row, weights) for row in scores]
    rewards = [reward for reward in all_rewards if not math.isnan(reward)]
    if rewards:
        means["reward"] = fmean(rewards)
    return means


def over_sets(sets: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Name each validation set's metrics ``<set>/<metric>``, and add their means over the sets, ``<metric>``.

    Standard errors (``_stderr``) give the error of the mean. A single set's metrics keep their names.
    """
    if len(sets) == 1:
        return dict(*sets.values())
    merged: dict[str, float] = {}
    values_by_metric: dict[str, list[float]] = {}
    for set_name, metrics in sets.items():
        for metric, value in metrics.items():
            merged[f"{set_name}/{metric}"] = value
            values_by_metric.setdefault(metric, []).append(value)
    for metric, values in values_by_metric.items():
        # The sets are independent, so the variances of their means add up.
        total = math.hypot(*values) if metric.endswith("_stderr") else sum(values)
        merged[metric] = total / len(values)
    return merged


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

    Args:
        trained: scores of the groups that the step trains on; ``reward/*`` are their means.
        drawn: scores of all groups that were sampled for it, those dropped by dynamic sampling included.
    """
    trained_scores = [scores for group in trained for scores in group]
    return component_means(trained_scores) | right_and_wrong(drawn)


def _component(name: str, value: float | None) -> dict[str, float]:
    """Return the component of an own function, whose value is None if it abstains."""
    if value is None:
        return {name: math.nan}
    if not math.isfinite(value):
        return {name: 0.0, NOT_FINITE: 1.0}
    return {name: value}
