"""A tokenizer's special tokens, and text from outside that must not imitate them."""

import re
import unicodedata
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

from nemo_grpo.support.errors import UserError


def reserved_texts(tokenizer: Any) -> tuple[str, ...]:
    """List the texts that a Hugging Face tokenizer always reads as one mark, such as ``</s>`` or ``[INST]``.

    Its special tokens, and those added tokens that neither begin nor end like a word: added words and runs of
    spaces are ordinary text.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    ends = [(token, {token.content[:1], token.content[-1:]}) for token in added]
    marks = [
        token.content
        for token, both in ends
        if token.special or not any(end.isalnum() or end.isspace() for end in both)
    ]
    special = map(str, getattr(tokenizer, "all_special_tokens", ()))
    return tuple(sorted({text for text in (*marks, *special) if text.strip()}))


def special_tags(tokenizer: Any, tags: Collection[str]) -> set[str]:
    """Return the tags that are a Hugging Face tokenizer's special tokens, which decoding may drop."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    return {token.content for token in added if token.special and token.content in tags}


def refuse_special_tags(tokenizer: Any, tags: Collection[str]) -> None:
    """Refuse special tags for an engine that drops every special token before a response is scored."""
    if hidden := sorted(special_tags(tokenizer, tags)):
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path!r} has {', '.join(hidden)} as special tokens, which "
            'NeMo-RL drops before rewards see a response; set "special": false for them in its files and '
            "take them off the lists of special tokens, as in Qwen3's, or use the embedded engine"
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
    while True:  # a space may complete another mark; it takes a longer run of spaces each time
        before = text
        for unseen in ("", " "):
            text = _broken_once(text, pattern, unseen)
        if text == before:
            return text


def _broken_once(text: str, pattern: re.Pattern[str], unseen: str) -> str:
    plain = _PLAIN.fullmatch(text) is not None
    pieces = list(text) if plain else [_folded(character, unseen) for character in text]
    folded = "".join(pieces)
    found = [match.start() for match in pattern.finditer(folded)]
    if not found:
        return text
    places = [place for place, piece in enumerate(pieces) for _ in piece]
    for start in reversed(found):
        first, second = places[start], places[start + 1]
        if second > first:
            text = f"{text[:second]} {text[second:]}"
        else:  # one character that stands for several
            text = text[:first] + " ".join(unicodedata.normalize("NFKD", text[first])) + text[first + 1 :]
    return text


_PLAIN = re.compile(r"[ -~]*")
"""Texts in which normalisers change nothing but case."""


@lru_cache(maxsize=4096)
def _folded(character: str, unseen: str) -> str:
    """Fold a character as normalisers may; one that is not seen becomes ``unseen``."""
    folded = ""
    for part in unicodedata.normalize("NFKD", character):
        kind = unicodedata.category(part)
        is_unseen = kind[0] == "C" or part == "\ufffd"
        folded += " " if part.isspace() else "" if kind == "Mn" else unseen if is_unseen else part
    return folded


@lru_cache(maxsize=8)
def _pattern(marks: tuple[str, ...]) -> re.Pattern[str]:
    folded = {
        "".join(_folded(character, unseen) for character in mark) for mark in marks for unseen in ("", " ")
    }
    both = {text for text in (*marks, *folded) if len(text) > 1 and text.strip()}
    return re.compile("|".join(map(re.escape, sorted(both, key=len, reverse=True))), re.IGNORECASE)
