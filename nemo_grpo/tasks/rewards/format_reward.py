r"""Format rewards: 1 if a response has the form that the prompt asks for, else 0. Linear in the text."""

from collections.abc import Callable
from typing import Literal

from nemo_grpo.tasks.response import TAGS, format_reward, render_response
from nemo_grpo.tasks.rewards.final_answer import last_boxed

Form = Literal["think_answer", "tags", "think", "think_closed", "boxed"]


def matched_think_tags(response: str) -> float:
    """Return 1 if there is one ``<think>`` followed by one ``</think>`` (CW-GRPO Appendix C)."""
    if response.count("<think>") != 1 or response.count("</think>") != 1:
        return 0.0
    return float(response.index("<think>") < response.index("</think>"))


def tags_in_order(response: str) -> float:
    """Return 1 if every tag of think and answer block occurs once, in order, whatever is around them.

    Logic-RL's release (TR-GRPO Table 5): kk.py, validate_response_structure.
    """
    if any(response.count(tag) != 1 for tag in TAGS):
        return 0.0
    places = [response.find(tag) for tag in TAGS]
    return float(places == sorted(places))


def think_closed(response: str) -> float:
    """Return 1 if ``</think>`` stands once on a line of its own (rewards.py of open-rs, CW-GRPO, GPG)."""
    return float(response.count("\n</think>\n") == 1)


def boxed(response: str) -> float:
    r"""Return 1 if there is a complete ``\boxed{..}`` that is not empty (the boxed rate of ERPO Table 1)."""
    answer = last_boxed(response)
    return float(answer is not None and answer.strip() != "")


FORMS: dict[Form, Callable[[str], float]] = {
    "think_answer": format_reward,
    "tags": tags_in_order,
    "think": matched_think_tags,
    "think_closed": think_closed,
    "boxed": boxed,
}
"""``think_answer`` is GPG's (Appendix B.4): one think block, one answer block, nothing else."""


def demonstrated_form(solution: str, answer: str, form: Form) -> str:
    """Write a worked solution as a response of this form."""
    if form in ("think_answer", "tags"):
        return render_response(solution, answer)
    if form == "think":
        return f"<think>{solution}</think>\n\n\\boxed{{{answer}}}"
    if form == "think_closed":
        return f"<think>{solution}\n</think>\n\n\\boxed{{{answer}}}"
    if last_boxed(solution):
        # Many solutions of data sets already end in a box.
        return solution
    return f"{solution} \\boxed{{{answer}}}"


def with_opened_think(response: str, is_open: bool) -> str:
    """Put ``<think>`` before a response if the prompt has opened the thought."""
    return f"<think>{response}" if is_open else response
