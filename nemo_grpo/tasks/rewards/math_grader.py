r"""Comparison of mathematical answers, as texts or by math-verify in expendable worker processes.

Equal texts are right. An answer that is not mathematics is compared only as text. math-verify compares all
others, with the settings of NeMo-RL's environment (`worker.mathematics`). An answer that takes too much
time or memory, or that crashes the worker, is wrong; see `worker_pool`.
"""

import logging
import re
import sys
from collections import OrderedDict

from nemo_grpo.tasks.rewards.final_answer import last_boxed
from nemo_grpo.tasks.rewards.latex import as_latex, normalized
from nemo_grpo.tasks.rewards.worker_pool import WorkerPool

log = logging.getLogger(__name__)

CACHE_SIZE = 20_000
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,14}")
"""Integers, which are compared as texts, without a worker."""
_WORDS = re.compile(r"(?=.*[^\W\d_]{2})(?:[^\W\d_]|[\s,;.:'\"?])+")
"""Letters of any alphabet, two of them side by side; a single letter is a variable."""
_TIME_OR_RATIO = re.compile(r"\d ?: ?\d")
_DATE = re.compile(r"(?<![\w.^{-])\d+([-/.])\d+(?:\1\d+)+(?![\w^])")
"""Numbers with two slashes or dashes; two dots make a version or an address."""
_OPTION = re.compile(
    r"\([A-J]\)(?=[ \d]|$)"
    r"|[A-J][).](?=[ \d]|$)"
    r"|[A-J]:(?= ?(?:\d|[^\W\d_]{2}))"  # A: B is a ratio
)
"""An option with its mark, and perhaps its text: ``(A)``, ``A. 12``, ``A: twelve``."""
_SEPARATOR = re.compile(r"[,;]|\b(?:and|or)\b")


class MathGrader(WorkerPool):
    """Compares answers; safe to call from several threads, each of which has a worker while it waits."""

    def __init__(self) -> None:
        unready = f"the worker that compares answers did not start; is math-verify in {sys.executable}?"
        super().__init__(("mathematics",), unready)

    def _forget(self) -> None:
        super()._forget()
        self._verdicts: OrderedDict[tuple[str, str], bool | None] = OrderedDict()

    def equal(self, reference: str, answer: str) -> bool:
        """Return True if the answer is the reference, as text or as mathematics.

        Anything that takes too much time or memory is False.
        """
        return bool(self.same(reference, answer))

    def undecided(self, reference: str, answer: str) -> bool:
        """Return True if the two were compared without a verdict in time."""
        pair = (normalized(answer_of(reference)), normalized(answer))
        with self._lock:
            # None is a recorded comparison without a verdict; False stands for a pair never compared.
            return self._verdicts.get(pair, False) is None

    def same(self, reference: str, answer: str) -> bool | None:
        """Compare an answer with a reference, or with another answer.

        Returns:
            None if there is no verdict within the limits on time and memory.
        """
        reference = answer_of(reference)
        normal_reference = normalized(reference)
        normal_answer = normalized(answer)
        if normal_reference == normal_answer:
            # Two empty texts are equal, but they are no answer.
            return bool(normal_reference)
        text_verdict = verdict_on_texts(normal_reference, normal_answer)
        if text_verdict is not None:
            return text_verdict
        # math-verify reads the answer as it was written, as in NeMo-RL, not as it was normalised.
        request = (as_latex(reference), as_latex(answer))
        with self._lock:
            if request in self._verdicts:
                return self._verdicts[request]
        # Release the lock while a worker computes, so that comparisons of other threads go on.
        reply = self.ask(request)
        verdict = None if reply is None else _VERDICTS.get(reply)
        with self._lock:
            self._verdicts[request] = verdict
            if verdict is None:
                log.info("no verdict within the limits, so 0: %.60r against %.60r", answer, reference)
                # `undecided` is asked about extracted answers, which are normalised.
                self._verdicts[normal_reference, normal_answer] = None
            while len(self._verdicts) > CACHE_SIZE:
                self._verdicts.popitem(last=False)
        return verdict


_VERDICTS = {b"1": True, b"0": False}
"""Reply of a worker -> verdict."""


def answer_of(reference: str) -> str:
    """Take a reference out of its box."""
    boxed = last_boxed(reference)
    return reference if boxed is None else boxed


SHARED = MathGrader()
"""The grader of all tasks in this process."""


def verdict_on_texts(reference: str, answer: str) -> bool | None:
    """Compare two different normalised answers as texts; return None if both are mathematics."""
    if _INTEGER.fullmatch(reference) and _INTEGER.fullmatch(answer):
        return False
    if is_text(reference) or is_text(answer):
        return compared_text(reference) == compared_text(answer)
    return None


def is_text(answer: str) -> bool:
    """Return True for words, times, ratios, dates and options such as ``(B) 42``: no mathematics."""
    matches = (
        _WORDS.fullmatch(answer),
        _TIME_OR_RATIO.search(answer),
        _DATE.search(answer),
        _OPTION.match(answer),
    )
    return any(matches)


def compared_text(answer: str) -> str:
    """Return the form in which texts are compared.

    This is an option's letter, or else the sorted parts of a list, without case, spaces and full stops.
    """
    option = _OPTION.match(answer)
    if option:
        return option[0].strip("().:")
    words = []
    for part in _SEPARATOR.split(answer):
        word = re.sub(r"[\s'\"]|\.(?!\d)", "", part)
        # The case of a single letter counts: the options A and B, the variables a and b.
        if len(word) > 1:
            word = word.casefold()
        if word:
            words.append(word)
    return ",".join(sorted(words))
