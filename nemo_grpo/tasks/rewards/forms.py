r"""Format rewards: 1 if a response has the form that the prompt asks for, else 0. Linear in the text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from nemo_grpo.tasks.response import format_reward, render_response
from nemo_grpo.tasks.rewards.final_answer import last_boxed

Form = Literal["think_answer", "think", "boxed"]


def matched_think_tags(response: str) -> float:
    """1 if there is one ``<think>`` followed by one ``</think>`` (CW-GRPO Appendix C)."""
    once = response.count("<think>") == 1 == response.count("</think>")
    return float(once and response.index("<think>") < response.index("</think>"))


def boxed(response: str) -> float:
    r"""1 if there is a complete ``\boxed{..}`` that is not empty (the boxed rate of ERPO Table 1)."""
    answer = last_boxed(response)
    return float(answer is not None and answer.strip() != "")


FORMS: dict[Form, Callable[[str], float]] = {
    "think_answer": format_reward,
    "think": matched_think_tags,
    "boxed": boxed,
}
"""``think_answer`` is GPG's (Appendix B.4): one think block, one answer block, nothing else."""


def demonstrated_form(solution: str, answer: str, form: Form) -> str:
    """A worked solution as a response of this form."""
    if form == "think_answer":
        return render_response(solution, answer)
    if form == "think":
        return f"<think>{solution}</think>\n\n\\boxed{{{answer}}}"
    return solution if last_boxed(solution) else f"{solution} \\boxed{{{answer}}}"


def with_opened_think(response: str, is_open: bool) -> str:
    """The response as the reader of prompt and response sees it: a prompt may have opened the think block."""
    return f"<think>{response}" if is_open else response
