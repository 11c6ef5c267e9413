r"""Compares mathematical answers in expendable worker processes.

An answer counts if it is the reference's text, or if all of it was read as mathematics and is equal; see
`equality`. One that takes too much time or memory, or that crashes the worker, is wrong; see `worker_pool`.
"""

import logging
import math
import re
import sys
from collections import OrderedDict

from nemo_grpo.tasks.rewards.final_answer import last_boxed, normalized
from nemo_grpo.tasks.rewards.latex import plain, readable, words_of
from nemo_grpo.tasks.rewards.worker_pool import WorkerPool

log = logging.getLogger(__name__)

CACHE_SIZE = 20_000
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,14}")
"""Integers, which are compared as texts, without a worker."""
_DATE = re.compile(r"\d{4}-\d\d-\d\d|\d{1,2}/\d{1,2}/\d{4}|\d+(?:\.\d+){2,}")
"""Dates, versions and addresses."""
_RANGE = re.compile(r"\d+-\d+")
_TIME = re.compile(r"(\d{1,2}):([0-5]\d)")
"""Times, and ratios such as ``5:12``, which are in lowest terms."""
_BASED = re.compile(r"(\w+)_(\w|\{\w+\})")
_UNIT = re.compile(r"\\cdot \\variable\{unit0\w+\}")
_LETTER = re.compile(r"\(?[A-J]\)?")
_OPTION = re.compile(r"\(?([A-J])(?:[).:].*)?")


class MathGrader(WorkerPool):
    """Compares answers; safe to call from several threads, each of which has a worker while it waits."""

    def __init__(self, *, cpu_seconds: float = 3.0, wall_seconds: float = 60.0) -> None:
        """Starts nothing yet; see `WorkerPool` for the limits of one comparison."""
        unready = f"the worker that compares answers did not start; is math-verify in {sys.executable}?"
        super().__init__(("mathematics",), unready, cpu_seconds=cpu_seconds, wall_seconds=wall_seconds)

    def _forget(self) -> None:
        super()._forget()
        self._known: OrderedDict[tuple[str, str], bool | None] = OrderedDict()

    def equal(self, reference: str, answer: str) -> bool:
        """True if the answer is the reference, as text or as mathematics; False for anything pathological."""
        return bool(self.same(reference, answer))

    def undecided(self, reference: str, answer: str) -> bool:
        """True if the two were compared without a verdict in time."""
        with self._lock:
            return self._known.get((normalized(answer_of(reference)), normalized(answer)), False) is None

    def same(self, reference: str, answer: str) -> bool | None:
        """Compare an answer with a reference, or with another answer; None: no verdict in time."""
        reference, answer = plain(answer_of(reference)), plain(answer)
        pair = normalized(reference), normalized(answer)
        if pair[0] == pair[1]:
            return bool(pair[0])
        if (verdict := verdict_on_texts(*pair)) is not None:
            return verdict
        request = readable(reference), readable(answer)
        if not words_of(request[1]) <= words_of(request[0]):
            return False
        with self._lock:
            if pair in self._known or request in self._known:
                return self._known.get(pair, self._known.get(request))
        verdict = {b"1": True, b"0": False}.get(self.ask(request) or b"")
        if verdict is None:
            log.info("no verdict within the limits, so 0: %.60r against %.60r", answer, reference)
        with self._lock:
            self._known[pair if verdict is None else request] = verdict
            if len(self._known) > CACHE_SIZE:
                self._known.popitem(last=False)
        return verdict


def answer_of(reference: str) -> str:
    """Take a reference out of its box."""
    return last_boxed(reference) or reference


SHARED = MathGrader()
"""The grader of all tasks in this process."""


def verdict_on_texts(reference: str, answer: str) -> bool | None:
    """Compare two different normalised answers that are texts; None: they are mathematics.

    Words are equal whatever their case, an option such as ``B. 42`` is its letter, a range or a time may have
    a unit, and a base may be left out. Integers, dates and versions are equal only to themselves.
    """
    texts = reference, answer
    one, other = reference.casefold(), answer.casefold()
    if all(len(text) > 1 and text.isalpha() for text in texts) and (one == other or len(one + other) > 4):
        return one == other
    time = _TIME.fullmatch(reference)
    if _RANGE.fullmatch(reference) or (time and (time[2] < "10" or math.gcd(int(time[1]), int(time[2])) > 1)):
        return _UNIT.sub("", readable(answer)) == reference
    if based := _BASED.fullmatch(reference):
        return based[1] == answer
    if any(map(_LETTER.fullmatch, texts)) and all(map(_OPTION.fullmatch, texts)):
        return _OPTION.sub(r"\1", reference) == _OPTION.sub(r"\1", answer)
    return False if all(map(_INTEGER.fullmatch, texts)) or any(map(_DATE.fullmatch, texts)) else None
