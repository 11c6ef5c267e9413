"""Answers in a person's words against a list of accepted ones, as in SQuAD's exact match."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_open_answer(answer: str) -> str:
    """Lower case, without ASCII punctuation and the articles a, an, the; single spaces.

    The order of steps is that of SQuAD's evaluation (1606.05250): case, punctuation, articles, spaces.
    Deviation: a step that would empty the answer, such as ``A`` or ``+``, is skipped.
    """
    lowered = answer.lower()
    bare = lowered.translate(_NO_PUNCTUATION)
    forms = (" ".join(form.split()) for form in (_ARTICLES.sub(" ", bare), bare, lowered))
    return next(filter(None, forms), "")


def matches_any(answer: str | None, accepted: Iterable[str]) -> bool:
    """True if the answer is one of the accepted ones, both normalised; an empty answer matches nothing."""
    normalized = normalize_open_answer(answer or "")
    return bool(normalized) and any(normalized == normalize_open_answer(gold) for gold in accepted)
