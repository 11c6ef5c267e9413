"""The interface of tasks: problems by number, a worked demonstration, and a score for a response."""

from __future__ import annotations

import hashlib
import logging
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from pydantic import BaseModel, ConfigDict

from nemo_grpo.support.errors import UserError

log = logging.getLogger(__name__)

HELD_OUT_SHARE = 5
"""One in five keys (problems, or whatever a task splits by) is kept for validation."""


def check_num_validation(wanted: int, available: int, source: str) -> None:
    """Check the number of validation problems.

    Raises: UserError: more are wanted than available.
    """
    if wanted > available:
        remedy = f"use {available} or fewer"
        if not available:
            remedy = "name files that have some, or set grpo.val_period=0 to train without validation"
        raise UserError(f"grpo.max_val_samples={wanted}: {source} has {available} problems; {remedy}")


VALIDATION_SET = "validation_set"
"""Metadata key of a validation problem: its set's name, if the task has several."""
NOT_FINITE = "not_finite"
"""Key beside the components of a response that had one without a finite value."""
ACCURACY = "1: the answer is correct; 0: it is wrong or missing"
FORMAT = "1: the response has the form that the prompt asks for; 0: it does not"


Message = Mapping[str, str]
"""``role`` and ``content`` of a conversation's message."""


@dataclass(frozen=True)
class Problem:
    """One question with its reference answer.

    Attributes:
        id: unique within the task; the same problem has the same id in every run.
        question: what goes into the prompt template; of a conversation the last message, the user's.
        answer: the reference, as `Task.score` compares it.
        metadata: JSON values that the task needs for demonstrations or for analysis by kind.
        history: messages before the question, with the conversation's own system message if it has one.
    """

    id: str
    question: str
    answer: str
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)
    history: Sequence[Message] = field(default=(), hash=False)


def by_validation_set(problems: Iterable[Problem]) -> dict[str, list[Problem]]:
    """Group problems by their validation set; one without a name is the only one."""
    found: dict[str, list[Problem]] = {}
    for problem in problems:
        found.setdefault(problem.metadata.get(VALIDATION_SET, ""), []).append(problem)
    return found


class TaskConfig(BaseModel, ABC):
    """A task's parameters: the recipe's ``nemo_grpo.task`` section. Unknown keys are errors.

    Attributes:
        reward_components: name -> meaning of every component of `Task.score`. ``accuracy`` in [0, 1] and
            ``format`` in {0, 1} are always there; others may be negative. ``nemo_grpo.rewards`` weights them.
        needs_images: a problem's ``metadata["images"]`` belong to its prompt.
        stop_texts: a turn of the policy ends where one of them is complete; none: a response is one turn.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    reward_components: ClassVar[Mapping[str, str]] = {"accuracy": ACCURACY, "format": FORMAT}
    needs_images: ClassVar[bool] = False
    stop_texts: ClassVar[tuple[str, ...]] = ()

    name: str

    @property
    def num_turns(self) -> int:
        """Maximum turns of the policy in a response."""
        return 1

    @abstractmethod
    def build(self) -> Task:
        """The task with these parameters."""


Answered = Iterable[tuple[Problem, Sequence[str]]]
"""Problems with all responses to each. A task may have ``overall(answered) -> dict[str, float]``: metrics of
a whole evaluation that are no means over problems."""


class Task(Protocol):
    """A source of problems with a verifiable answer. Stateless: to resume a run, a counter is enough."""

    @property
    def config(self) -> TaskConfig:
        """The parameters that this task was built with."""
        ...

    def train_problem(self, index: int, seed: int) -> Problem:
        """Problem number ``index`` of the endless training stream ``seed``; always the same one.

        Raises: UserError: the task has no training problems.
        """
        ...

    def validation_problems(self, num_problems: int) -> list[Problem]:
        """The first ``num_problems`` of a fixed list that no training stream ever contains.

        Raises: UserError: the task holds fewer.
        """
        ...

    def demonstration(self, problem: Problem, rng: random.Random) -> str:
        """A correct response with its reasoning, for the supervised warm start; ``rng`` varies the reasoning.

        Raises: UserError: the task has none.
        """
        ...

    def extract(self, response: str) -> str | None:
        """The answer that the response gives, normalised: equal answers are equal texts. None: no answer."""
        ...

    def score(self, problem: Problem, response: str) -> dict[str, float]:
        """The components that ``config.reward_components`` declares; the recipe weights them."""
        ...


def checked_score(task: Task, problem: Problem, response: str) -> dict[str, float]:
    """`Task.score`. A component without a finite value becomes 0, is logged, and marked by `NOT_FINITE`."""
    scores = task.score(problem, response)
    wrong = {name: value for name, value in scores.items() if not math.isfinite(value)}
    if not wrong:
        return scores
    log.warning(
        "task %s, problem %s: %s counts as 0 for the response %r",
        *(task.config.name, problem.id, ", ".join(f"{k}={v}" for k, v in wrong.items()), response),
    )
    return scores | dict.fromkeys(wrong, 0.0) | {NOT_FINITE: 1.0}


def reward_of(scores: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """The scalar reward: the recipe's ``nemo_grpo.rewards`` weights a response's components.

    NaN: a component with a weight abstains, and the response is left out of its group and of the loss.
    """
    return sum(weight * scores[name] for name, weight in weights.items() if weight)


def is_held_out(key: object) -> bool:
    """True for the fixed fifth of all keys that belongs to validation; by hash, so that no list is needed."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_SHARE == 0


def distinct(draw: Callable[[int], Problem], num_problems: int) -> list[Problem]:
    """The first ``num_problems`` different ones, by id, that ``draw`` gives when told how many are found."""
    found: dict[str, Problem] = {}
    while len(found) < num_problems:
        problem = draw(len(found))
        found.setdefault(problem.id, problem)
    return list(found.values())


def stream(*parts: object) -> random.Random:
    """A random generator that depends on ``parts`` only: the same in every process and on every machine."""
    return random.Random("/".join(map(str, parts)))
