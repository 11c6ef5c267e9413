r"""The final answer of a mathematical response, found in linear time for any text.

Searched outside the thinking: in the last complete ``<answer>`` block that is not empty, or, without one, in
all of the text. There the complete ``\boxed{..}`` that closes last and is not empty counts, with those that
``,``, ``and``, ``or`` or ``\quad`` joins to it. A block without a box is read as a whole: all its
``$formulas$`` are one list, unless a number stands beside them; without formulas the text after ``answer is``
counts, else all of it.
"""

import re
from itertools import accumulate

from nemo_grpo.tasks.response import last_answer, outside_thinking
from nemo_grpo.tasks.rewards.latex import normalized

MAX_CHARS = 1000
"""Longer texts are not answers: no reference is nearly as long, and graders would take long."""
MAX_DEPTH = 20
"""Maximum nesting of brackets, for the same reason."""

_TOKEN = re.compile(
    r"(?P<box>\\{1,2}(?:boxed|fbox)\s{0,5}\{)"
    r"|\\boxed(?:\s{1,5}|(?=[-+.]?\d))(?P<bare>[^\s$\\{}]{1,50})"
    r"|\\.|[{}]",
    re.DOTALL,
)
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
_JOINT = re.compile(
    r"(?=.*?(?:[,;]|and|or|\\q?quad))"
    r"(?:[\s$,;]|\\[()\[\],;:! ]|\\q?quad|\\text\s*\{[\s,]*(?:and|or)[\s,]*\}|and|or)+",
    re.DOTALL,
)
MAX_JOINT = 60
"""Characters between two boxes of a list."""
_FORMULA = re.compile(r"\$\$(.+?)\$\$|\$([^$]+)\$(?!\d)|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
"""A formula in its marks; a dollar sign before a digit is a price's."""


def final_answer(response: str) -> str | None:
    """Return the final answer without its box; None: there is none, or it is too long or too deep."""
    response = outside_thinking(response)
    block = last_answer(response)
    answer = last_boxed(response if block is None else block)
    if answer is None and block is not None and "\\boxed" not in block:
        answer = _whole_block(block.strip())
    if answer is None or len(answer) > MAX_CHARS:
        return None
    answer = _BOX.sub("", answer).strip()  # else math-verify would take 5 from \boxed{\boxed{5} or 6}
    if not normalized(answer):
        return None
    steps = ((character in "([{") - (character in ")]}") for character in answer)
    depths = accumulate(steps, lambda depth, step: max(0, depth + step), initial=0)
    return answer if max(depths) <= MAX_DEPTH else None


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


def _boxes(text: str) -> list[tuple[int, slice, int]]:
    """Find start, inside and end of complete boxes that are not empty, without those inside another."""
    boxes: list[tuple[int, slice, int]] = []
    open_braces: list[tuple[int, int] | None] = []  # of a box: its start and its inside's; None for no box
    for token in _TOKEN.finditer(text):
        if token["bare"] is not None:
            boxes.append((token.start(), slice(*token.span("bare")), token.end()))
        elif token[0][-1] == "{" and token[0] != "\\{":
            open_braces.append(token.span() if token["box"] else None)
        elif token[0] == "}" and open_braces and (opened := open_braces.pop()) is not None:
            inside = slice(opened[1], token.start())
            if token.start() - opened[1] > MAX_CHARS or text[inside].strip():
                while boxes and boxes[-1][0] > opened[0]:
                    boxes.pop()
                boxes.append((opened[0], inside, token.end()))
    return boxes


def _whole_block(block: str) -> str | None:
    """Read a block without a box; None: it is too long, so that its formulas are found in short time."""
    if len(block) > MAX_CHARS:
        return None
    text = block.replace("\\$", "")
    formulas = ["".join(filter(None, groups)).strip() for groups in _FORMULA.findall(text)]
    has_number_beside = re.search(r"\d", _FORMULA.sub("", text))
    if formulas and not has_number_beside:
        return ", ".join(dict.fromkeys(formulas))
    return block.rpartition("answer is")[2]
