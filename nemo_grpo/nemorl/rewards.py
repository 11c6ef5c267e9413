"""Reward components of responses: noted where they are scored, and added to the driver's metrics.

NeMo-RL's trainer sees only a response's total reward. The environment's actor notes the components, and the
driver takes them when a step or a validation is logged.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from nemo_grpo.nemorl.callbacks import Callback, is_validation
from nemo_grpo.tasks.base import Problem, set_of
from nemo_grpo.tasks.scoring import over_sets, reward_metrics, validation_rewards

T = TypeVar("T")


def whole_groups(responses: list[T], size: int) -> list[list[T]]:
    """Split responses into groups of ``size``, in their order; a rest that fills no group is left out."""
    num_groups = len(responses) // size
    return [responses[index * size : (index + 1) * size] for index in range(num_groups)]


class NotedScores(ABC):
    """Newest reward components of each response since the last `take`.

    Attributes:
        num_responses: responses noted so far; the newest one's number.
        scores: key of a problem, see `key_of` -> number of a response -> its components.
    """

    def __init__(self) -> None:
        self.num_responses = 0
        self.scores: dict[str, dict[int, Mapping[str, float]]] = {}

    @abstractmethod
    def key_of(self, problem: Problem) -> str:
        """Return the key under which a problem's responses are collected."""

    @abstractmethod
    def take(self) -> dict[str, float]:
        """Return the metrics of the noted responses, and forget them; {} without any."""

    def note(self, problem: Problem, scores: Mapping[str, float], response: int | None = None) -> int:
        """Keep a response's newest components.

        Args:
            problem: the problem that the response answers.
            scores: its components after this turn.
            response: the number that its first turn returned; None in that turn.

        Returns:
            The response's number.
        """
        key = self.key_of(problem)
        if response is None:
            self.num_responses += 1
            response = self.num_responses
            self.scores.setdefault(key, {})[response] = scores
        elif response in self.scores.get(key, {}):
            self.scores[key][response] = scores
        # Otherwise `take` has already removed the response: asynchronous training logs while it samples.
        return response


class RolloutRewards(NotedScores):
    """Reward components of the responses sampled since the last `take`, trained or dropped."""

    def __init__(self, num_generations: int) -> None:
        """Args: num_generations: G, responses in a group."""
        super().__init__()
        self.num_generations = num_generations

    def key_of(self, problem: Problem) -> str:
        """Collect by problem, because groups are formed within one."""
        return problem.id

    def take(self) -> dict[str, float]:
        """Return ``reward/*`` and ``rollout/all_*`` of the whole groups, and forget them; {} without any.

        An incomplete group stays until it is whole: asynchronous training samples while it logs.
        """
        groups = []
        for problem_id, responses in list(self.scores.items()):
            for numbers in whole_groups(list(responses), self.num_generations):
                groups.append([responses.pop(number) for number in numbers])
            if not responses:
                del self.scores[problem_id]
        if not groups:
            return {}
        # NeMo-RL does not tell an environment which groups dynamic sampling has dropped.
        return reward_metrics(trained=groups, drawn=groups)


class ValidationRewards(NotedScores):
    """Reward components of the responses of one validation, by validation set."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        """Args: weights: ``nemo_grpo.rewards``."""
        super().__init__()
        self.weights = weights

    def key_of(self, problem: Problem) -> str:
        """Collect by validation set."""
        return set_of(problem)

    def take(self) -> dict[str, float]:
        """Return `validation_rewards` of each set and their means, and forget them; {} without any."""
        metrics_by_set = {}
        for set_name, responses in self.scores.items():
            set_metrics = validation_rewards(list(responses.values()), self.weights)
            # NeMo-RL measures the accuracy itself, and ranks checkpoints by it.
            set_metrics.pop("accuracy", None)
            metrics_by_set[set_name] = set_metrics
        self.scores = {}
        return over_sets(metrics_by_set) if metrics_by_set else {}


class RewardMetrics(Callback):
    """Adds the environments' `RolloutRewards` to every step's metrics, `ValidationRewards` to a validation's.

    NeMo-RL's mean reward is NaN if a reward function abstains. The rewarded responses' mean replaces it.
    """

    def __init__(self, environments: Sequence[Mapping[str, Any]]) -> None:
        """Args: environments: name -> actor, of training and validation; only ours note components."""
        self.actors: dict[str, list[Any]] = {}
        for prefix, environment in zip(("train", "validation"), environments, strict=False):
            actors = [actor for actor in environment.values() if hasattr(actor, "take_rewards")]
            self.actors[prefix] = actors

    def added_metrics(self, metrics: Mapping[str, Any], step: int, prefix: str) -> Mapping[str, float]:
        """Take the components that the actors hold."""
        if prefix == "train":
            return replaced_means(metrics) | self._take(prefix)
        if is_validation(metrics, prefix):
            return self._take(prefix)
        return {}

    def _take(self, prefix: str) -> dict[str, float]:
        """Take the components of training or of validation."""
        # Not at the top: this package does not require Ray, which comes with NeMo-RL.
        import ray

        actors = self.actors.get(prefix, [])
        metrics: dict[str, float] = {}
        for metrics_of_actor in ray.get([actor.take_rewards.remote() for actor in actors]):
            metrics |= metrics_of_actor
        return metrics


MEANS = {"reward": "reward/mean", "filtered_reward": "kept/reward/mean"}
"""NeMo-RL's mean reward -> our estimator's, which leaves out responses without a reward."""


def replaced_means(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return our means for those of NeMo-RL's that are NaN."""
    means = {}
    for name, our_name in MEANS.items():
        if our_name in metrics and math.isnan(metrics.get(name, 0.0)):
            means[name] = metrics[our_name]
    return means
