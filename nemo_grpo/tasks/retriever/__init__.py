"""Retrieval of passages for queries, by BM25 in this process or by any service over HTTP.

It needs the extra ``search``. The libraries are imported where they are used, so that tasks load without it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class RetrieverError(RuntimeError):
    """Retrieval fails for every query: the service is gone, or its answers are invalid."""


@dataclass(frozen=True)
class Passage:
    """One entry of a corpus.

    Attributes:
        score: orders the passages of one answer; higher is better.
    """

    id: str
    title: str
    text: str
    score: float = 0.0


class Retriever(Protocol):
    """Finds passages. Safe to call from several threads."""

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """Find at most ``top_k`` passages for each query, best first; the same query gives the same passages.

        Raises:
            RetrieverError: the service fails.
        """
        ...
