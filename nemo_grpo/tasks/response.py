"""Reader of ``<think>..</think><answer>..</answer>``, in time linear in the text, without executing it."""

import re

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_THINK_TAG = re.compile("(</?think>)")
_WELL_FORMED = re.compile(r"\s*<think>.*</think>\s*<answer>.*</answer>\s*", re.DOTALL)


def render_response(reasoning: str, answer: str) -> str:
    """Write a response that `format_reward` accepts."""
    return f"<think>{reasoning}</think><answer>{answer}</answer>"


def last_answer(response: str) -> str | None:
    """Return the text in the last complete ``<answer>`` block that is not empty, or None if there is none."""
    # Search backwards, each time before the last match. This is linear in the text, unlike a pattern with .*.
    start = len(response)
    while True:
        end = response.rfind("</answer>", 0, start)
        if end < 0:
            return None
        start = response.rfind("<answer>", 0, end)
        if start < 0:
            return None
        answer = response[start + len("<answer>") : end]
        if answer.strip():
            return answer


def outside_thinking(response: str) -> str:
    """Cut out all thinking, also if it is never closed, or if the prompt has opened it."""
    outside: list[str] = []
    is_thinking = False
    for piece in _THINK_TAG.split(response):
        if piece == "<think>":
            is_thinking = True
        elif piece == "</think>":
            if not is_thinking:
                # The prompt has opened this thinking, so the text before the tag belongs to it.
                outside.pop()
            is_thinking = False
        elif not is_thinking:
            outside.append(piece)
    return "".join(outside)


def normalize_answer(answer: str) -> str:
    """Normalise: lower case, single spaces, none at the ends or around commas."""
    return ",".join(" ".join(part.split()) for part in answer.casefold().split(","))


def extract_answer(response: str) -> str | None:
    """Return the last answer outside the thinking, normalised; None if there is none."""
    answer = last_answer(outside_thinking(response))
    return None if answer is None else normalize_answer(answer)


def exact_match(answer: str, response: str) -> dict[str, float]:
    """Score a task with one correct text: ``accuracy``, 1 if the answers are equal, and ``format``."""
    correct = extract_answer(response) == normalize_answer(answer)
    return {"accuracy": float(correct), "format": format_reward(response)}


def format_reward(response: str) -> float:
    """Return 1 if the response is one think block, one answer block and white space; otherwise 0."""
    # Counting first makes the pattern unambiguous, and so linear, for any text.
    is_unambiguous = all(response.count(tag) == 1 for tag in TAGS)
    return float(is_unambiguous and _WELL_FORMED.fullmatch(response) is not None)
