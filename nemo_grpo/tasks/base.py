"""The interface of tasks: problems, demonstrations and scores; for multi-turn tasks also an environment."""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

from pydantic import BaseModel, ConfigDict

from nemo_grpo.support.errors import UserError
from nemo_grpo.tasks.response import TAGS

HELD_OUT_SHARE = 5
"""One key in this many is held out for validation. A key is a problem, or the part of it by which a task
splits its problems."""

T = TypeVar("T")


def check_num_validation(num_problems: int, available: int, source: str) -> None:
    """Refuse more validation problems than the source has."""
    if num_problems > available:
        remedy = f"use {available} or fewer"
        if not available:
            remedy = "name files that have some, or set grpo.val_period=0 to train without validation"
        raise UserError(f"grpo.max_val_samples={num_problems}: {source} has {available} problems; {remedy}")


VALIDATION_SET = "validation_set"
"""Metadata key of a validation problem: its set's name, if the task has several."""
NOT_FINITE = "not_finite"
"""Key that marks the scores of a response with a component that was not finite."""
ACCURACY = "1: the answer is correct; 0: it is wrong or missing"
FORMAT = "1: the response has the form that the prompt asks for; 0: it does not"


Message = Mapping[str, str]
"""``role`` and ``content`` of a conversation's message."""


@dataclass(frozen=True)
class Problem:
    """One question with its reference answer.

    Attributes:
        id: unique within the task; the same problem has the same id in every run.
        question: text that goes into the prompt template. For a conversation: its last message, the user's.
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
    """Group problems by the name of their validation set; a single set has the empty name."""
    return by_set((set_of(problem), problem) for problem in problems)


def set_of(problem: Problem) -> str:
    """Return the name of a problem's validation set, which is empty if it is the only one."""
    return str(problem.metadata.get(VALIDATION_SET, ""))


def by_set(named: Iterable[tuple[str, T]]) -> dict[str, list[T]]:
    """Group values by the name of the validation set that they belong to, in order."""
    sets: dict[str, list[T]] = {}
    for name, value in named:
        sets.setdefault(name, []).append(value)
    return sets


class TaskConfig(BaseModel, ABC):
    """A task's parameters: the recipe's ``nemo_grpo.task`` section. Unknown keys are errors.

    Attributes:
        reward_components: name -> meaning of every component of `Task.score`. ``accuracy`` in [0, 1] and
            ``format`` in {0, 1} are required; any other component may be negative. ``nemo_grpo.rewards``
            weights them.
        needs_images: a problem's ``metadata["images"]`` belong to its prompt.
        stop_texts: texts that end a turn of the policy; empty if a response is one turn.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True)

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
        """Build the task with these parameters."""


Answered = Iterable[tuple[Problem, Sequence[str]]]
"""Problems, each with all of its responses.

A task may have ``overall(answered) -> dict[str, float]``: metrics of a whole evaluation that are no means
over problems."""


class Task(Protocol):
    """A source of problems with verifiable answers. It has no state, so a run resumes from a counter."""

    @property
    def config(self) -> TaskConfig:
        """The parameters that this task was built with."""
        ...

    def train_problem(self, index: int, seed: int) -> Problem:
        """Return problem number ``index`` of the endless training stream ``seed``; always the same one.

        Raises:
            UserError: the task has no training problems.
        """
        ...

    def validation_problems(self, num_problems: int) -> list[Problem]:
        """Return the first ``num_problems`` of a fixed list that no training stream ever contains.

        Raises:
            UserError: the task has fewer.
        """
        ...

    def demonstration(self, problem: Problem, rng: random.Random) -> str:
        """Write a correct response with its reasoning, for supervised training; ``rng`` varies the reasoning.

        Raises:
            UserError: the task has no demonstrations.
        """
        ...

    def extract(self, response: str) -> str | None:
        """Return the response's answer, or None if it has none.

        The answer is normalised, so that equal answers are equal texts.
        """
        ...

    def score(self, problem: Problem, response: str) -> dict[str, float]:
        """Score the components that ``config.reward_components`` declares; the recipe weights them."""
        ...


@dataclass(frozen=True)
class Episode:
    """State of one response between two turns of the policy.

    Attributes:
        num_turns: turns of the policy so far.
        num_searches: calls that were carried out.
        num_errors: calls that were malformed.
    """

    num_turns: int = 0
    num_searches: int = 0
    num_errors: int = 0


@dataclass(frozen=True)
class Observed:
    """The environment's answer to a turn.

    Attributes:
        episode: state after the turn.
        observation: text to append to the response; None: the response is over.
    """

    episode: Episode
    observation: str | None


@runtime_checkable
class MultiTurnTask(Task, Protocol):
    """A task whose responses are turns of the policy with observations in between, all in one text.

    Stateless like every task: the sampler keeps the `Episode` of each response.
    """

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """A turn ends where one of them is complete, or at the end-of-sequence token."""
        ...

    @property
    def tags(self) -> tuple[str, ...]:
        """The task's tags besides `TAGS`."""
        ...

    def observe(
        self, episodes: Sequence[Episode], turns: Sequence[str], reserved: Sequence[str] = ()
    ) -> list[Observed]:
        """Answer one finished turn of each of several responses.

        Args:
            episodes: state of each response before this turn.
            turns: text that the policy wrote in this turn.
            reserved: special tokens, which text from outside must not contain.

        Raises:
            RetrieverError: the tool itself fails.
        """
        ...

    def segments(self, response: str) -> list[tuple[str, bool]]:
        """Cut a response into texts, each with True if the policy wrote it; they join to the response."""
        ...


def tags_of(task: Task) -> tuple[str, ...]:
    """Return the tags that a task's reward reads; a tokenizer made for the task has a token for each."""
    return (*TAGS, *getattr(task, "tags", ()))


def make_ready(task: Task) -> None:
    """Load a task's tool now, so that the first response that calls it does not wait."""
    load_tool = getattr(task, "make_ready", None)
    if load_tool is not None:
        load_tool()


def reward_of(scores: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Weight a response's components by the recipe's ``nemo_grpo.rewards``.

    Returns:
        The reward. NaN means that a component with a weight abstains; the response is then left out of its
        group and of the loss.
    """
    # Skip components of weight 0 instead of multiplying: 0 times the NaN of one that abstains is NaN.
    return sum(weight * scores[name] for name, weight in weights.items() if weight)


def is_held_out(key: object) -> bool:
    """Return True for the fixed fifth of all keys that belongs to validation."""
    # A hash needs no list of held-out keys. It is not Python's own, which differs between processes.
    digest = hashlib.sha256(repr(key).encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_SHARE == 0


def distinct(draw: Callable[[int], Problem], num_problems: int) -> list[Problem]:
    """Draw until ``num_problems`` have different ids; ``draw`` gets the number of problems so far."""
    problems: dict[str, Problem] = {}
    while len(problems) < num_problems:
        problem = draw(len(problems))
        problems.setdefault(problem.id, problem)
    return list(problems.values())


def stream(*parts: object) -> random.Random:
    """Make a random generator from ``parts`` alone: the same in every process and on every machine."""
    # Python hashes a text seed by SHA-512, not by the hash() that differs between processes.
    return random.Random("/".join(map(str, parts)))
