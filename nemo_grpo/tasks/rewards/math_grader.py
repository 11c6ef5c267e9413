r"""Compares mathematical answers by math-verify, in expendable worker processes.

An answer that takes too much time or memory, or that crashes the worker, is wrong; see `worker_pool`. So is
one that math-verify takes for the reference because it drops part of it: a policy that is paid for
``41 = 42`` or ``42 \text{ (or any number)}`` learns to write such answers.
"""

import logging
import math
import re
import sys
from collections import OrderedDict
from itertools import combinations
from typing import TypeVar

from nemo_grpo.tasks.rewards.final_answer import normalized
from nemo_grpo.tasks.rewards.notation import plain
from nemo_grpo.tasks.rewards.worker_pool import WorkerPool

log = logging.getLogger(__name__)

CACHE_SIZE = 20_000
MAX_MEMBERS = 30
"""A longer list is not searched for a value that it gives twice."""
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,14}")
"""Two of these are equal only if their texts are, so no worker is needed."""
Key = TypeVar("Key")
Value = TypeVar("Value")
_RELATION = re.compile(
    r":?=|\\(?:equiv|approx|simeq|cong|to|implies|iff)(?![A-Za-z])|\\(?:Long|long)?(?:[Ll]eft)?[Rr]ightarrow"
)
_ASSIGNMENT = re.compile(r"^\s*[A-Za-z]\s*:?=")
_COMMAND = re.compile(r"\\(?:[dt]?frac|sqrt|times|cdot|div|pi|left|right|[,;:! ])")
_BASE = re.compile(r"\d_(?:\{(\w+)\}|(\w))")
_WRAPPED = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_CONJUNCTION = re.compile(r"\s*,?\s*(?:or|and)\s*")
_LISTED = re.compile(r"(?<![A-Za-z])(?:or|and)(?![A-Za-z])")
_UNIT = re.compile(r"[\sA-Za-z./^$%\u00b0-]*")
_HEDGES = {
    *("about", "all", "almost", "and", "any", "around", "approximately", "but", "either", "except", "false"),
    *("if", "incorrect", "least", "most", "no", "nope", "not", "or", "possibly", "probably", "unless"),
    "wrong",
    # these make another value of it
    *("billion", "dozen", "half", "hundred", "million", "minus", "negative", "plus", "thousand", "trillion"),
}
_DOTS = re.compile(r"\.\.\.|\u2026|\\[lcv]?dots")
_WORD = re.compile(r"[^\W\d_]{2,}")
_DATE = re.compile(r"\d{4}-\d\d-\d\d|\d{1,2}/\d{1,2}/\d{4}|\d+(?:\.\d+){2,}")
"""Also versions and addresses."""
_RANGE = re.compile(r"\d+-\d+")
_TIME = re.compile(r"(\d{1,2}):([0-5]\d)")
_LETTER = re.compile(r"\(?[A-J]\)?")
_OPTION = re.compile(r"\(?([A-J])(?:[).:].*)?")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:(?:\{,\}|,)\d{3})+(?:\.\d+)?")


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
        pair = reference, answer = plain(reference), plain(answer)
        if is_qualified(*pair):
            return False
        if not _LISTED.search(reference + answer) and (verdict := verdict_on_texts(one, other)) is not None:
            return verdict
        with self._lock:
            if pair in self._known:
                return self._known[pair]
        verdict = self._ask(*pair)
        if verdict:
            verdict = self._holds_up(*pair)
        elif verdict is False and one.endswith("%") != other.endswith("%"):
            verdict = self._verdict(reference.rstrip("\\%$ "), answer.rstrip("\\%$ "))
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


def verdict_on_texts(reference: str, answer: str) -> bool | None:
    """The verdict on two different normalised answers that are texts rather than mathematics; else None.

    Words are equal whatever their case, an option such as ``B. 42`` is its letter, and a range or a time may
    have a unit. Integers, dates and versions are equal only to themselves.
    """
    texts = reference, answer
    if all(map(_WORD.fullmatch, texts)):
        return reference.casefold() == answer.casefold()
    if _is_range_or_time(reference):
        return re.sub(r"\\[A-Za-z]+|[^\d:-]", "", answer) == reference
    if any(map(_LETTER.fullmatch, texts)) and all(map(_OPTION.fullmatch, texts)):
        return _OPTION.sub(r"\1", reference) == _OPTION.sub(r"\1", answer)
    return False if all(map(_INTEGER.fullmatch, texts)) or any(map(_DATE.fullmatch, texts)) else None


def _is_range_or_time(text: str) -> bool:
    """``5-10``, ``10:30``, ``7:05``; a ratio such as ``5:12`` is in its lowest terms."""
    if (time := _TIME.fullmatch(text)) is None:
        return _RANGE.fullmatch(text) is not None
    return time[2][0] == "0" or math.gcd(int(time[1]), int(time[2])) > 1


def _remember(cache: OrderedDict[Key, Value], key: Key, value: Value) -> None:
    cache[key] = value
    if len(cache) > CACHE_SIZE:
        cache.popitem(last=False)


SHARED = MathGrader()
"""The one that the tasks of this process use."""


def is_qualified(reference: str, answer: str) -> bool:
    r"""Whether an answer says more than a value, a conjunction or a unit, in words, by dots or by a base.

    Words in the reference are for math-verify; so are answers that are words altogether.
    """
    if _DOTS.search(answer) and not _DOTS.search(reference):
        return True
    bases = [first or second for first, second in _BASE.findall(answer)]
    if bases and bases != [first or second for first, second in _BASE.findall(reference)]:
        return True
    if _WRAPPED.search(reference) or _WRAPPED.fullmatch(answer.strip()):
        return False
    return any(
        not _UNIT.fullmatch(text) or not _HEDGES.isdisjoint(text.lower().split())
        for text in _WRAPPED.findall(answer)
        if not _CONJUNCTION.fullmatch(text)
    )


def claimed_values(reference: str, answer: str) -> list[str]:
    """The links without an unknown of a chain such as ``x = 6/8 = 3/4``: each must be the reference.

    Empty for a reference that is a relation, other than ``x = 3/4``, and for a list.
    """
    links, reference = _RELATION.split(answer), _ASSIGNMENT.sub("", reference)
    if len(links) == 1 or _RELATION.search(reference) or len(members(answer)) > 1 or _LISTED.search(answer):
        return []
    return [link for link in links if link.strip() and not re.search(r"[A-Za-z]", _COMMAND.sub("", link))]


def members(answer: str) -> list[str]:
    """The values of a list without brackets, by its commas; the commas of ``1,000,000`` separate nothing."""
    if _THOUSANDS.fullmatch(re.sub(r"\s|\\!", "", answer)):
        return [answer]
    found, depth = [""], 0
    for character in answer:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            found.append("")
        else:
            found[-1] += character
    return [member for member in found if member.strip()]
