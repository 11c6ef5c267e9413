"""Compares mathematical answers by math-verify, in expendable worker processes.

An answer that takes too much time or memory, or that crashes the worker, is wrong; see `worker_pool`.
"""

import logging
import re
import sys
from collections import OrderedDict
from itertools import combinations
from typing import TypeVar

from nemo_grpo.tasks.rewards.answer_form import claimed_values, is_qualified, members
from nemo_grpo.tasks.rewards.final_answer import normalized
from nemo_grpo.tasks.rewards.worker_pool import WorkerPool

log = logging.getLogger(__name__)

CACHE_SIZE = 20_000
MAX_MEMBERS = 30
"""A longer list is not searched for a value that it gives twice."""
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,14}")
"""Two of these are equal only if their texts are, so no worker is needed."""
Key = TypeVar("Key")
Value = TypeVar("Value")


class MathGrader(WorkerPool):
    """Compares answers; safe to call from several threads, each of which has a worker while it waits."""

    def __init__(self, *, cpu_seconds: float = 3.0, wall_seconds: float = 60.0) -> None:
        """Starts nothing yet; see `WorkerPool` for the limits of one comparison."""
        unready = f"the worker that compares answers did not start; is math-verify in {sys.executable}?"
        super().__init__(("mathematics",), unready, cpu_seconds=cpu_seconds, wall_seconds=wall_seconds)

    def _forget(self) -> None:
        super()._forget()
        self._known: OrderedDict[tuple[str, str], bool | None] = OrderedDict()
        self._undecided: OrderedDict[tuple[str, str], None] = OrderedDict()

    def equal(self, reference: str, answer: str) -> bool:
        """True if the answer is the reference, as text or as mathematics; False for anything pathological.

        Raises: RuntimeError: no worker can be started (math-verify is not installed).
        """
        verdict = self._verdict(reference, answer)
        if verdict is None:
            with self._lock:
                _remember(self._undecided, (normalized(reference), normalized(answer)), None)
        return bool(verdict)

    def undecided(self, reference: str, answer: str) -> bool:
        """Whether `equal` had no verdict on the two; either may be the cause, for this problem only."""
        with self._lock:
            return (normalized(reference), normalized(answer)) in self._undecided

    def same(self, one: str, other: str) -> bool | None:
        """Whether two answers of a vote are equal; None: no verdict within the limits."""
        return self._verdict(one, other)

    def _verdict(self, reference: str, answer: str) -> bool | None:
        one, other = normalized(reference), normalized(answer)
        if one == other:
            return bool(one)
        if not needs_worker(one, other):
            return False
        pair = (reference, answer)
        with self._lock:
            if pair in self._known:
                return self._known[pair]
        verdict = False if is_qualified(*pair) else self._ask(*pair)
        if verdict:
            verdict = self._holds_up(*pair)
        with self._lock:
            _remember(self._known, pair, verdict)
        return verdict

    def _holds_up(self, reference: str, answer: str) -> bool | None:
        """Whether the rest of an answer agrees with the part that math-verify compared."""
        for value in claimed_values(reference, answer):
            if not (verdict := self._verdict(reference, value)):
                return verdict
        values = members(answer)
        return len(values) > MAX_MEMBERS or not any(self._verdict(*two) for two in combinations(values, 2))

    def _ask(self, reference: str, answer: str) -> bool | None:
        verdict = {b"1": True, b"0": False}.get(self.ask((reference, answer)) or b"")
        if verdict is None:
            log.info("no verdict within the limits, so 0: %.60r against %.60r", answer, reference)
        return verdict


def needs_worker(one: str, other: str) -> bool:
    """Whether two different normalised answers can be equal as mathematics: two integers cannot."""
    return not (_INTEGER.fullmatch(one) and _INTEGER.fullmatch(other))


def _remember(cache: OrderedDict[Key, Value], key: Key, value: Value) -> None:
    cache[key] = value
    if len(cache) > CACHE_SIZE:
        cache.popitem(last=False)


SHARED = MathGrader()
"""The one that the tasks of this process use."""
