"""Scores and answers of responses. A user's own task computes them in worker processes with limits."""

import json
import logging
import math
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from nemo_grpo.support import extensions
from nemo_grpo.tasks.base import NOT_FINITE, Problem, Task, TaskConfig
from nemo_grpo.tasks.rewards.own_reward import NO_VALUE
from nemo_grpo.tasks.rewards.worker_pool import WorkerPool

log = logging.getLogger(__name__)


class ScoreFailed(RuntimeError):
    """A call of an own task raised an error, returned a value of the wrong kind, or exceeded the limits."""


class OwnTaskWorkers:
    """Workers that build a user's own task from its parameters, and call its ``score`` and ``extract``.

    Attributes:
        pool: the workers, under the limits of own rewards.
    """

    def __init__(self, section: Mapping[str, Any]) -> None:
        """Prepare the pool for the recipe's ``nemo_grpo.task``, given as JSON values."""
        name = section["name"]
        self.pool = WorkerPool(
            ("own_task", sys.path, extensions.texts_of([name]), dict(section)),
            f"the worker of nemo_grpo.task.name={name} did not start; its messages are above",
            prints=True,
        )

    def score(self, problem: Problem, response: str) -> dict[str, float]:
        """Return the declared components of a response.

        Raises:
            ScoreFailed: the task's ``score`` failed.
        """
        scores: dict[str, float] = self._ask("score", problem, response)
        return scores

    def extract(self, response: str) -> str | None:
        """Return the response's answer, or None if it has none.

        Raises:
            ScoreFailed: the task's ``extract`` failed.
        """
        answer: str | None = self._ask("extract", response)
        return answer

    def _ask(self, method: str, *arguments: Any) -> Any:
        reply = self.pool.ask((method, arguments))
        result = {"error": NO_VALUE} if reply is None else json.loads(reply)
        if "error" in result:
            raise ScoreFailed(result["error"])
        return result["value"]


# The text of the user's file is part of the key: after an edit, new workers load the new code.
@lru_cache(maxsize=8)
def _workers(section: str, _text: str) -> OwnTaskWorkers:
    return OwnTaskWorkers(json.loads(section))


def workers_of(config: TaskConfig) -> OwnTaskWorkers:
    """Return the workers of an own task, the same for equal parameters and an unchanged file."""
    section = json.dumps(config.model_dump(mode="json"), sort_keys=True)
    return _workers(section, json.dumps(extensions.texts_of([config.name])))


def is_own(task: Task) -> bool:
    """Return True if the recipe names the task by a file or module of the user's."""
    return extensions.is_reference(task.config.name)


def checked_score(task: Task, problem: Problem, response: str) -> dict[str, float]:
    """Score a response, with 0 for every component that has no finite value.

    Such a component is logged, and the scores are marked by `NOT_FINITE`. If an own task's ``score`` fails,
    all components become 0.
    """
    # One bad response must not end a run of days: it gets 0, and `Scorer` counts such failures.
    if is_own(task):
        try:
            scores = workers_of(task.config).score(problem, response)
        except ScoreFailed as error:
            log.warning(
                "task %s, problem %s: score failed, every component counts as 0 for the response %r: %s",
                task.config.name,
                problem.id,
                response,
                error,
            )
            return dict.fromkeys(task.config.reward_components, 0.0) | {NOT_FINITE: 1.0}
    else:
        scores = task.score(problem, response)
    not_finite = {name: value for name, value in scores.items() if not math.isfinite(value)}
    if not not_finite:
        return scores
    log.warning(
        "task %s, problem %s: %s counts as 0 for the response %r",
        task.config.name,
        problem.id,
        ", ".join(f"{name}={value}" for name, value in not_finite.items()),
        response,
    )
    return scores | dict.fromkeys(not_finite, 0.0) | {NOT_FINITE: 1.0}


def extracted_answer(task: Task, response: str) -> str | None:
    """Return a response's answer, or None if it has none or if an own task's ``extract`` fails (logged)."""
    if not is_own(task):
        return task.extract(response)
    try:
        return workers_of(task.config).extract(response)
    except ScoreFailed as error:
        log.warning("task %s: extract failed for the response %r: %s", task.config.name, response, error)
        return None
