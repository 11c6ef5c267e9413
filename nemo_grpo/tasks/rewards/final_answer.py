r"""The final answer of a mathematical response, found in linear time for any text.

Searched outside the thinking: in the last complete ``<answer>`` block that is not empty, or, without one, in
all of the text. There the complete ``\boxed{..}`` that closes last and is not empty counts. A block without a
box gives its last ``$formula$``, else the text after ``answer is``, else all of its text.
"""

import re

from nemo_grpo.tasks.response import last_answer, outside_thinking
from nemo_grpo.tasks.rewards.notation import plain

MAX_CHARS = 1000
"""Longer texts are not answers: no reference is nearly as long, and graders would take long."""
MAX_DEPTH = 20
"""Maximum nesting of brackets, for the same reason."""

_TOKEN = re.compile(
    r"(?P<box>\\{1,2}(?:boxed|fbox)\s{0,5}\{)|\\boxed\s{1,5}(?P<bare>[^\s$\\{}]{1,50})|\\.|[{}]", re.DOTALL
)
_FORMULAS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_SPACING = re.compile(r"\\[!,;: ]|\\q?quad|\\displaystyle|\\left(?![a-z])|\\right(?![a-z])|[\s$~]")
_SPELLING = {"dfrac": r"\frac", "tfrac": r"\frac", "leq": r"\le", "geq": r"\ge", "ne": r"\neq", "mid": "|"}
_SPELLINGS = re.compile(rf"\\({'|'.join(_SPELLING)})(?![A-Za-z])")
_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}\\]*)\}")


def final_answer(response: str) -> str | None:
    """The final answer without its box; None where there is none or it is too long or too deep."""
    response = outside_thinking(response)
    block = last_answer(response)
    answer = last_boxed(response if block is None else block)
    if answer is None and block is not None and "\\boxed" not in block:
        answer = _last_formula(block)
    if answer is None or len(answer) > MAX_CHARS:
        return None
    answer = plain(answer)
    return answer if 0 < len(answer) <= MAX_CHARS and _depth(answer) <= MAX_DEPTH else None


def last_boxed(text: str) -> str | None:
    r"""Inside of the complete ``\boxed{..}``, ``\fbox{..}`` or ``\boxed 5`` that closes last; None: no box.

    Empty boxes do not count; a box that contains only another box counts as the inner one.
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
    """Equal for answers that differ only as `plain` says, in spacing, dollar signs or text wrappers."""
    answer = _SPELLINGS.sub(lambda command: _SPELLING[command[1]], plain(answer))
    answer = _SPACING.sub("", answer)
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
            end = token.start()
            found = (start, end) if end - start > MAX_CHARS or text[start:end].strip() else found
    return found


def _last_formula(block: str) -> str:
    block = block.replace("\\$", "")
    for opening, closing in _FORMULAS:
        end = block.rfind(closing)
        while closing == "$" and end >= 0 and block[end + 1 : end + 2].isdigit():  # a price
            end = block.rfind(closing, 0, end)
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
