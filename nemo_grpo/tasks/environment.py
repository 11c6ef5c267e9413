"""The interface of multi-turn tasks: an environment speaks between the turns of a response."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from nemo_grpo.tasks.base import Task
from nemo_grpo.tasks.response import TAGS


@dataclass(frozen=True)
class Episode:
    """State of one response between two turns of the policy: turns, calls, and calls that were malformed."""

    num_turns: int = 0
    num_searches: int = 0
    num_errors: int = 0


@dataclass(frozen=True)
class Observed:
    """A turn's outcome: the episode after it, and the text to append; None: the response is over."""

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
        """Tags beside `TAGS`, see `tags_of`."""
        ...

    def observe(
        self, episodes: Sequence[Episode], turns: Sequence[str], reserved: Sequence[str] = ()
    ) -> list[Observed]:
        """Answer one finished turn of each of several responses.

        Args:   turns: what the policy wrote in this turn alone; any text.
                reserved: special tokens, which text from outside must not contain.
        Raises: RetrieverError: the tool itself fails.
        """
        ...

    def segments(self, response: str) -> list[tuple[str, bool]]:
        """The response cut into (text, written by the policy); joined they are the response again."""
        ...


def tags_of(task: Task) -> tuple[str, ...]:
    """Texts that a task's reward looks for; a tokenizer made for the task keeps them as single tokens."""
    return (*TAGS, *getattr(task, "tags", ()))


def make_ready(task: Task) -> None:
    """Load a task's tool now, which is otherwise loaded when a response first calls it.

    Raises: UserError: it cannot be loaded.
    """
    getattr(task, "make_ready", lambda: None)()
