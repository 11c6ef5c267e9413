"""What a tokenizer reads as a mark must not come from outside: no passage plays a part."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from typing import Any


def reserved_texts(tokenizer: Any) -> tuple[str, ...]:
    """What a Hugging Face tokenizer reads as one mark wherever it stands, such as ``</s>`` or ``[INST]``.

    Its special tokens, and of the other added ones those that neither begin nor end like a word: a word that
    was added to the vocabulary, or a run of spaces, plays no part in a conversation.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    marks = [token.content for token in added if token.special or _like_a_mark(token.content)]
    special = map(str, getattr(tokenizer, "all_special_tokens", ()))
    return tuple(sorted({text for text in (*marks, *special) if text.strip()}))


def broken_up(text: str, reserved: Sequence[str]) -> str:
    """The text, with a space within everything that is reserved; without any of it, the text as it is.

    Case does not matter, nor do Unicode's compatible forms (``<`` of full width): some tokenizers normalise
    before they look for their marks.
    """
    if not reserved:
        return text
    pattern = _pattern(tuple(reserved))
    normal = unicodedata.normalize("NFKC", text)
    if normal != text and pattern.search(normal):
        text = normal
    while pattern.search(
        text
    ):  # a space may complete another mark; it takes a longer run of spaces each time
        text = pattern.sub(lambda found: f"{found[0][0]} {found[0][1:]}" if len(found[0]) > 1 else " ", text)
    return text


@lru_cache(maxsize=8)
def _pattern(reserved: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted(reserved, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)), re.IGNORECASE)


def _like_a_mark(text: str) -> bool:
    return not any(end.isalnum() or end.isspace() for end in (text[:1], text[-1:]))
