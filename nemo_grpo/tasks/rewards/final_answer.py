r"""Search for the final answer of a mathematical response, in linear time for any text.

The answer is outside the thinking: in the last complete ``<answer>`` block that is not empty, or in the whole
text if there is no block.

- With boxes, the answer is the complete ``\boxed{..}`` that closes last and is not empty. Boxes that ``,``,
  ``and``, ``or`` or ``\quad`` joins to it make one list with it.
- A block without a box is read as a whole. All its ``$formulas$`` are one list, unless a number stands beside
  them. Without formulas the answer is the text after ``answer is``, or all of the block.
"""

import re
from typing import NamedTuple

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
    """Return the final answer without its box, or None if there is none, or if it is too long or too deep."""
    response = outside_thinking(response)
    block = last_answer(response)
    answer = last_boxed(response if block is None else block)
    if answer is None and block is not None and "\\boxed" not in block:
        answer = _whole_block(block.strip())
    if answer is None or len(answer) > MAX_CHARS:
        return None
    # Otherwise math-verify would take 5 from \boxed{\boxed{5} or 6}.
    answer = _BOX.sub("", answer).strip()
    if not normalized(answer) or _depth(answer) > MAX_DEPTH:
        return None
    return answer


def _depth(answer: str) -> int:
    """Return the deepest nesting of brackets; a closing bracket without an opening one does not count."""
    depth = 0
    deepest = 0
    for character in answer:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth = max(0, depth - 1)
    return deepest


def last_boxed(text: str) -> str | None:
    r"""Return the content of the box that closes last, or None if there is no box.

    A box is ``\boxed{..}``, ``\fbox{..}`` or ``\boxed 5``. Boxes joined to the last one make one list with
    it. Empty boxes do not count. A box that contains only another box counts as the inner one.
    """
    contents: list[str] = []
    start_of_next = 0
    for box in reversed(_boxes(text)):
        if contents:
            # The length first, which bounds the time of the pattern.
            is_close = start_of_next - box.end <= MAX_JOINT
            if not is_close or not _JOINT.fullmatch(text, box.end, start_of_next):
                break
        contents.append(_innermost(text[box.inside]))
        start_of_next = box.start
    # A box repeated in the list counts once.
    boxed = ", ".join(dict.fromkeys(reversed(contents)))
    return boxed if boxed else None


def _innermost(content: str) -> str:
    """Unwrap a box's content while it is nothing but another box."""
    while len(content) <= MAX_CHARS:
        content = content.strip()
        boxes = _boxes(content)
        if not boxes:
            break
        last = boxes[-1]
        if (last.start, last.end) != (0, len(content)):
            break
        content = content[last.inside]
    return content


class _Box(NamedTuple):
    """A complete box in a text: where it starts, its content, and where it ends."""

    start: int
    inside: slice
    end: int


def _boxes(text: str) -> list[_Box]:
    """Find the complete boxes that are not empty, but none that is inside another."""
    boxes: list[_Box] = []
    # Braces that are still open: (start of the box, start of its content) for a box, None for another brace.
    open_braces: list[tuple[int, int] | None] = []
    for token in _TOKEN.finditer(text):
        if token["bare"] is not None:
            # A box without braces, such as \boxed 5.
            boxes.append(_Box(token.start(), slice(*token.span("bare")), token.end()))
        elif token[0][-1] == "{" and token[0] != "\\{":
            open_braces.append(token.span() if token["box"] else None)
        elif token[0] == "}" and open_braces:
            opened = open_braces.pop()
            if opened is None:
                # The brace that closes here began no box.
                continue
            start, inside_start = opened
            inside = slice(inside_start, token.start())
            # Do not strip a box that is too long for an answer: nested ones would be copied at every level.
            is_too_long = token.start() - inside_start > MAX_CHARS
            if is_too_long or text[inside].strip():
                # The outer box closes after the inner ones, and replaces them.
                while boxes and boxes[-1].start > start:
                    boxes.pop()
                boxes.append(_Box(start, inside, token.end()))
    return boxes


def _whole_block(block: str) -> str | None:
    """Read a block without a box; return None if it is too long."""
    # Finding formulas takes more than linear time.
    if len(block) > MAX_CHARS:
        return None
    # An escaped dollar sign is a price's, which begins no formula.
    text = block.replace("\\$", "")
    # The pattern has a group for each kind of marks, of which one has the formula.
    formulas = ["".join(filter(None, groups)).strip() for groups in _FORMULA.findall(text)]
    has_number_beside = re.search(r"\d", _FORMULA.sub("", text))
    if formulas and not has_number_beside:
        return ", ".join(dict.fromkeys(formulas))
    return block.rpartition("answer is")[2]
