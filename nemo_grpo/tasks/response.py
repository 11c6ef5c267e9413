"""Reading ``<think>..</think><answer>..</answer>``: linear in the text, nothing is ever executed."""

import re

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_WELL_FORMED = re.compile(r"\s*<think>.*</think>\s*<answer>.*</answer>\s*", re.DOTALL)


def render_response(reasoning: str, answer: str) -> str:
    """Write a response that `format_reward` accepts."""
    return f"<think>{reasoning}</think><answer>{answer}</answer>"


def last_answer(response: str) -> str | None:
    """Return the text inside the last complete answer tag that is not empty, as written; None without one."""
    start = len(response)
    while (end := response.rfind("</answer>", 0, start)) >= 0:
        if (start := response.rfind("<answer>", 0, end)) < 0:
            break
        if (answer := response[start + len("<answer>") : end]).strip():
            return answer
    return None


def outside_thinking(response: str) -> str:
    """Cut out the thinking: from first ``<think>``, or the beginning, to last ``</think>``."""
    thought, closed, rest = response.rpartition("</think>")
    before, opened, _ = thought.partition("<think>")
    return (before if closed and opened else "") + rest


def normalize_answer(answer: str) -> str:
    """Normalise: lower case, single spaces, none at the ends or around commas."""
    return ",".join(" ".join(part.split()) for part in answer.casefold().split(","))


def extract_answer(response: str) -> str | None:
    """Return the last answer, normalised; None if there is none."""
    answer = last_answer(response)
    return None if answer is None else normalize_answer(answer)


def exact_match(answer: str, response: str) -> dict[str, float]:
    """Score a task with one correct text: ``accuracy``, 1 if the answers are equal, and ``format``."""
    correct = extract_answer(response) == normalize_answer(answer)
    return {"accuracy": float(correct), "format": format_reward(response)}


def format_reward(response: str) -> float:
    """Return 1 if the response is one think block, one answer block and white space; otherwise 0."""
    # Counting first makes the pattern unambiguous, and so linear, for any text.
    once = all(response.count(tag) == 1 for tag in TAGS)
    return float(once and _WELL_FORMED.fullmatch(response) is not None)
