"""Reward components of a step, and how many groups are all right or all wrong, in NeMo-RL's log.

NeMo-RL's trainer sees only a response's total reward. The environment's actor keeps the components of the
responses that it scores, and the driver takes them when a step is logged.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from nemo_grpo.nemorl.observers import listening
from nemo_grpo.tasks.scoring import component_means, right_and_wrong


class DrawnScores:
    """Components of the responses that were drawn since the last `take`, whether they train or not."""

    def __init__(self, num_generations: int) -> None:
        """Args: num_generations: G, responses in a group; 0 keeps nothing, for validation."""
        self.num_generations = num_generations
        self.num_noted = 0
        self.by_problem: dict[str, dict[int, Mapping[str, float]]] = {}

    def note(self, problem: str, scores: Mapping[str, float], response: int | None = None) -> int:
        """Keep a response's newest components.

        Args:    problem: its id.  response: what the response's first turn returned; None in that turn.
        Returns: a number that stands for the response.
        """
        responses = self.by_problem.setdefault(problem, {}) if self.num_generations else {}
        if response is None:
            response = self.num_noted = self.num_noted + 1
            responses[response] = scores
        elif response in responses:  # else its group was taken already
            responses[response] = scores
        return response

    def take(self) -> dict[str, float]:
        """``reward/*`` and ``rollout/all_*`` of the whole groups, which are forgotten; nothing without any.

        Parts of a group stay: asynchronous training draws while it logs.
        """
        groups, size = [], self.num_generations
        for problem, responses in list(self.by_problem.items()):
            numbers = list(responses)
            whole = len(numbers) // size * size
            for start in range(0, whole, size):
                groups.append([responses.pop(number) for number in numbers[start : start + size]])
            if not responses:
                del self.by_problem[problem]
        if not groups:
            return {}
        return component_means([scores for group in groups for scores in group]) | right_and_wrong(groups)


@contextmanager
def log_drawn(environments: Sequence[Mapping[str, Any]], logger: Any) -> Iterator[None]:
    """Within the block, add the `DrawnScores` of a task's environment to the training metrics of every step.

    Args: environments: name -> actor, of training and validation; NeMo-RL's own keep no components.
          logger: NeMo-RL's.
    """
    ours = [actor for actors in environments for actor in actors.values() if hasattr(actor, "take_drawn")]

    def add(_metrics: Mapping[str, Any], _step: int, prefix: str) -> dict[str, float]:
        if prefix != "train":
            return {}
        import ray

        taken = ray.get([actor.take_drawn.remote() for actor in ours])
        return {name: value for numbers in taken for name, value in numbers.items()}

    with listening(logger, adds=add):
        yield
