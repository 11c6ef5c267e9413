"""What a task with several turns is: between two turns of a response, an environment speaks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from nemo_grpo.tasks.base import Task


@dataclass(frozen=True)
class Episode:
    """Where one response stands between two turns.

    Attributes: num_turns: turns that the policy has had.  num_searches: calls that were carried out.
                num_errors: calls that were malformed.
    """

    num_turns: int = 0
    num_searches: int = 0
    num_errors: int = 0


@dataclass(frozen=True)
class Observed:
    """What came of a turn: the episode after it, and the text to go on from; None: the response is over."""

    episode: Episode
    observation: str | None


@runtime_checkable
class MultiTurnTask(Task, Protocol):
    """A task whose responses are turns of the policy with observations in between, all in one text.

    Stateless like every task: whoever samples keeps the `Episode` of each response.
    """

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """A turn ends where one of them is complete, or at the end-of-sequence token."""
        ...

    @property
    def tags(self) -> tuple[str, ...]:
        """Texts that a tokenizer made for this task keeps in one piece, beside those of every task."""
        ...

    def observe(
        self, episodes: Sequence[Episode], turns: Sequence[str], reserved: Sequence[str] = ()
    ) -> list[Observed]:
        """Answer one finished turn of each of several responses.

        Args:   turns: what the policy wrote in this turn alone; any text.
                reserved: what no text from outside may hold in an observation: special tokens.
        Raises: RetrieverError: the tool itself fails, whatever the turn said.
        """
        ...

    def segments(self, response: str) -> list[tuple[str, bool]]:
        """The response cut into (text, written by the policy); joined they are the response again."""
        ...
