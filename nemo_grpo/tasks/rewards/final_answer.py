r"""The final answer of a mathematical response, found in linear time for any text.

Searched in the last complete ``<answer>`` block; without one, after the last ``</think>``; without that, in
the whole response. There the complete ``\boxed{..}`` that closes last counts. An ``<answer>`` block without a
box gives its last ``$formula$``, else the text after ``answer is``, else all of its text.
"""

import re
import unicodedata

from nemo_grpo.tasks.response import last_answer

MAX_CHARS = 1000
"""Longer texts are not answers: no reference is nearly as long, and graders would take long."""
MAX_DEPTH = 20
"""Maximum nesting of brackets, for the same reason."""

_TOKEN = re.compile(
    r"(?P<box>\\{1,2}(?:boxed|fbox)\s{0,5}\{)|\\boxed\s{1,5}(?P<bare>[^\s$\\{}]{1,50})|\\.|[{}]", re.DOTALL
)
_FORMULAS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_SPACING = re.compile(r"\\[!,;: ]|\\q?quad|\\displaystyle|\\left(?![a-z])|\\right(?![a-z])|[\s$~]")
_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}\\]*)\}")


def final_answer(response: str) -> str | None:
    """The final answer without its box; None where there is none or it is too long or too deep."""
    block = last_answer(response)
    scope = response.rpartition("</think>")[2] if block is None else block
    answer = last_boxed(scope)
    if answer is None and block is not None and "\\boxed" not in block:
        answer = _last_formula(block)
    if answer is None or len(answer) > MAX_CHARS or _depth(answer) > MAX_DEPTH:
        return None
    return _plain_characters(answer).strip().rstrip(".,;:").rstrip() or None


def last_boxed(text: str) -> str | None:
    r"""Inside of the complete ``\boxed{..}``, ``\fbox{..}`` or ``\boxed 5`` that closes last; None: no box.

    A box that contains only another box counts as the inner one.
    """
    span = _last_box(text)
    while span is not None:
        start, end = span
        if end - start > MAX_CHARS:
            break
        inner = text[start:end].strip()
        match = _TOKEN.match(inner)
        if match is None or match["box"] is None or _last_box(inner) != (match.end(), len(inner) - 1):
            return inner
        text, span = inner, (match.end(), len(inner) - 1)
    return None if span is None else text[slice(*span)]


def normalized(answer: str) -> str:
    """Equal for answers that differ only in spacing, dollar signs, text wrappers or a final full stop."""
    answer = _SPACING.sub("", answer).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    answer = answer.removesuffix(".")
    wrapped = _WRAPPED.fullmatch(answer)
    return answer if wrapped is None else wrapped[1]


def _last_box(text: str) -> tuple[int, int] | None:
    """Where the inside of the box that closes last begins and ends."""
    found = None
    open_braces: list[int | None] = []  # for each open brace: where a box's inside begins, None for no box
    for token in _TOKEN.finditer(text):
        if token["box"] is not None:
            open_braces.append(token.end())
        elif token["bare"] is not None:
            found = token.span("bare")
        elif token[0] == "{":
            open_braces.append(None)
        elif token[0] == "}" and open_braces and (start := open_braces.pop()) is not None:
            found = (start, token.start())
    return found


def _last_formula(block: str) -> str:
    block = block.replace("\\$", "")
    for opening, closing in _FORMULAS:
        end = block.rfind(closing)
        start = block.rfind(opening, 0, max(end, 0))
        if start >= 0 and block[start + len(opening) : end].strip():
            return block[start + len(opening) : end]
    return block.rpartition("answer is")[2]


def _depth(answer: str) -> int:
    """Maximum nesting depth of brackets of any kind."""
    depth = deepest = 0
    for character in answer:
        depth = max(0, depth + (character in "([{") - (character in ")]}"))
        deepest = max(deepest, depth)
    return deepest


def _plain_characters(answer: str) -> str:
    """Decimal digits of other scripts and typographic minus signs as ASCII; superscripts are left alone."""
    digits = (
        str(unicodedata.decimal(c)) if not c.isascii() and unicodedata.decimal(c, None) is not None else c
        for c in answer
    )
    return "".join(digits).replace("\u2212", "-").replace("\u2013", "-")
