r"""The final answer of a mathematical response, found in linear time for any text.

Searched outside the thinking: in the last complete ``<answer>`` block that is not empty, or, without one, in
all of the text. There the complete ``\boxed{..}`` that closes last and is not empty counts, with those that
``,``, ``and``, ``or`` or ``\quad`` joins to it. A block without a box gives its last ``$formula$``, else the
text after ``answer is``, else all of its text.
"""

import re
from itertools import accumulate

from nemo_grpo.tasks.response import last_answer, outside_thinking
from nemo_grpo.tasks.rewards.latex import CONJUNCTION, WRAPPER, plain

MAX_CHARS = 1000
"""Longer texts are not answers: no reference is nearly as long, and graders would take long."""
MAX_DEPTH = 20
"""Maximum nesting of brackets, for the same reason."""

_TOKEN = re.compile(
    r"(?P<box>\\{1,2}(?:boxed|fbox)\s{0,5}\{)|\\boxed\s{1,5}(?P<bare>[^\s$\\{}]{1,50})|\\.|[{}]", re.DOTALL
)
_JOINT = re.compile(
    r"(?=.*?(?:[,;]|and|or|\\q?quad))"
    r"(?:[\s$,;]|\\[()\[\],;:! ]|\\q?quad|\\text\s*\{[\s,]*(?:and|or)[\s,]*\}|and|or)+",
    re.DOTALL,
)
MAX_JOINT = 60
"""Characters between two boxes of a list."""
_FORMULAS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))


def final_answer(response: str) -> str | None:
    """Return the final answer without its box; None: there is none, or it is too long or too deep."""
    response = outside_thinking(response)
    block = last_answer(response)
    answer = last_boxed(response if block is None else block)
    if answer is None and block is not None and "\\boxed" not in block:
        answer = _last_formula(block)
    if answer is None or len(answer) > MAX_CHARS:
        return None
    answer = plain(answer)
    steps = ((character in "([{") - (character in ")]}") for character in answer)
    depths = accumulate(steps, lambda depth, step: max(0, depth + step), initial=0)
    return answer if 0 < len(answer) <= MAX_CHARS and max(depths) <= MAX_DEPTH else None


def last_boxed(text: str) -> str | None:
    r"""Return the inside of the ``\boxed{..}``, ``\fbox{..}`` or ``\boxed 5`` that closes last; None: no box.

    Boxes joined to it make one list with it. Empty boxes do not count; a box that contains
    only another box counts as the inner one.
    """
    insides: list[str] = []
    after = 0
    for start, inside, end in reversed(_boxes(text)):
        if insides and (after - end > MAX_JOINT or not _JOINT.fullmatch(text, end, after)):
            break
        boxed = text[inside]
        while len(boxed) <= MAX_CHARS and (boxes := _boxes(boxed := boxed.strip())):
            if boxes[-1][::2] != (0, len(boxed)):
                break
            boxed = boxed[boxes[-1][1]]
        insides.append(boxed)
        after = start
    return ", ".join(dict.fromkeys(reversed(insides))) or None


def normalized(answer: str) -> str:
    """Normalise: answers that differ in spelling (`plain`), spacing or an outer wrapper become equal."""
    answer = re.sub(r"(?<!\d) | (?!\d)", "", CONJUNCTION.sub(",", plain(answer)))
    answer = re.sub(r"([_^])\{(\w)\}", r"\1\2", answer)
    return whole[1] if (whole := WRAPPER.fullmatch(answer)) else answer


def _boxes(text: str) -> list[tuple[int, slice, int]]:
    """Find start, inside and end of complete boxes that are not empty, without those inside another."""
    found: list[tuple[int, slice, int]] = []
    open_braces: list[tuple[int, int] | None] = []  # of a box: its start and its inside's; None for no box
    for token in _TOKEN.finditer(text):
        if token["bare"] is not None:
            found.append((token.start(), slice(*token.span("bare")), token.end()))
        elif token[0][-1] == "{" and token[0] != "\\{":
            open_braces.append(token.span() if token["box"] else None)
        elif token[0] == "}" and open_braces and (opened := open_braces.pop()) is not None:
            inside = slice(opened[1], token.start())
            if token.start() - opened[1] > MAX_CHARS or text[inside].strip():
                while found and found[-1][0] > opened[0]:
                    found.pop()
                found.append((opened[0], inside, token.end()))
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
