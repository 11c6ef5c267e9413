"""Special tokens of a tokenizer, and the protection of prompts against outside text that imitates them."""

import re
import unicodedata
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

from nemo_grpo.support.errors import UserError


def reserved_texts(tokenizer: Any) -> tuple[str, ...]:
    """List the texts that a Hugging Face tokenizer always reads as one mark, such as ``</s>`` or ``[INST]``.

    These are its special tokens, and its added tokens except words and runs of spaces, which are ordinary
    text.
    """
    texts = set(map(str, getattr(tokenizer, "all_special_tokens", ())))
    for token in getattr(tokenizer, "added_tokens_decoder", {}).values():
        ends = (token.content[:1], token.content[-1:])
        is_ordinary = any(character.isalnum() or character.isspace() for character in ends)
        if token.special or not is_ordinary:
            texts.add(token.content)
    return tuple(sorted(text for text in texts if text.strip()))


def special_tags(tokenizer: Any, tags: Collection[str]) -> set[str]:
    """Return the tags that are a Hugging Face tokenizer's special tokens, which decoding may drop."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    return {token.content for token in added if token.special and token.content in tags}


def refuse_special_tags(tokenizer: Any, tags: Collection[str]) -> None:
    """Refuse special tags for an engine that drops every special token before a response is scored."""
    dropped_tags = sorted(special_tags(tokenizer, tags))
    if dropped_tags:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path!r} has {', '.join(dropped_tags)} as special tokens, "
            'which NeMo-RL drops before rewards see a response; set "special": false for them in its files '
            "and take them off the lists of special tokens, as in Qwen3's, or use the embedded engine"
        )


def broken_up(text: str, reserved: Sequence[str]) -> str:
    """Put a space inside every reserved text.

    Some tokenizers normalise before they search for marks. Matching therefore ignores case, Unicode
    compatibility forms (``<`` of full width), accents, and invisible characters such as U+0001 or U+200B,
    which normalisers drop or read as a space. A normaliser's custom replacements are not covered.

    A mark of one character, such as a padding token ``!``, cannot be broken up: it stays, and the tokenizer
    reads it as its special token.
    """
    marks = tuple(mark for mark in reserved if len(mark) > 1)
    if not marks:
        return text
    pattern = _pattern(marks)
    # A space may complete another mark, so repeat until nothing changes. This ends, because every repetition
    # needs a mark with a longer run of spaces.
    while True:
        before = text
        for unseen in ("", " "):
            text = _broken_once(text, pattern, unseen)
        if text == before:
            return text


def _broken_once(text: str, pattern: re.Pattern[str], unseen: str) -> str:
    """Put a space inside each mark in a text, whose invisible characters are read as ``unseen``."""
    pieces = list(text)
    if not _PLAIN.fullmatch(text):
        pieces = [_folded(character, unseen) for character in text]
    folded = "".join(pieces)
    starts = [match.start() for match in pattern.finditer(folded)]
    if not starts:
        return text
    # places[i] is the index in `text` of folded character i. A character may fold to several, or to none.
    places = [place for place, piece in enumerate(pieces) for _ in piece]
    for start in reversed(starts):  # from the end, so that earlier places stay valid
        first = places[start]
        second = places[start + 1]
        if second > first:
            text = f"{text[:second]} {text[second:]}"
        else:
            # Both folded characters come from one character, such as a ligature, which is written out.
            written_out = " ".join(unicodedata.normalize("NFKD", text[first]))
            text = text[:first] + written_out + text[first + 1 :]
    return text


_PLAIN = re.compile(r"[ -~]*")
"""Texts in which normalisers change nothing but case."""


@lru_cache(maxsize=4096)
def _folded(character: str, unseen: str) -> str:
    """Fold a character as normalisers may; an invisible one becomes ``unseen``."""
    folded = ""
    for part in unicodedata.normalize("NFKD", character):
        category = unicodedata.category(part)
        if part.isspace():
            folded += " "
        elif category == "Mn":  # an accent
            continue
        elif category.startswith("C") or part == "\ufffd":  # a control or format character
            folded += unseen
        else:
            folded += part
    return folded


@lru_cache(maxsize=8)
def _pattern(marks: tuple[str, ...]) -> re.Pattern[str]:
    """Make a pattern that finds the marks in a folded text.

    It has each mark as it is written, and as `_folded` changes it. A mark of which one character remains is
    left out, because no space fits into it.
    """
    spellings = set(marks)
    for mark in marks:
        for unseen in ("", " "):
            spellings.add("".join(_folded(character, unseen) for character in mark))
    breakable = [spelling for spelling in spellings if len(spelling) > 1 and spelling.strip()]
    # Put the longest first, because a pattern takes the first alternative that matches at a place.
    breakable.sort(key=len, reverse=True)
    return re.compile("|".join(map(re.escape, breakable)), re.IGNORECASE)
