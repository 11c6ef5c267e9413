"""Mathematics: problems from JSONL files, answers compared as text and as mathematics.

The same grading serves the mathematical vision task; `docs/tasks.md` says which answers count.
"""

from __future__ import annotations

import logging
import math
import random
import re
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from nemo_grpo.tasks.base import Problem
from nemo_grpo.tasks.jsonl import FileTask, FileTaskConfig, solution_of
from nemo_grpo.tasks.rewards.final_answer import MAX_CHARS, MAX_DEPTH, final_answer
from nemo_grpo.tasks.rewards.format_reward import FORMS, Form, demonstrated_form, with_opened_think
from nemo_grpo.tasks.rewards.latex import normalized
from nemo_grpo.tasks.rewards.math_grader import SHARED, answer_of

log = logging.getLogger(__name__)


class MathConfig(FileTaskConfig):
    """Parameters of `Math`."""

    reward_components: ClassVar = {
        **FileTaskConfig.reward_components,
        "cosine": "of the length: 0.5 to 1 for a correct answer, -0.5 to 0 for a wrong one (open-rs)",
    }

    name: Literal["math"] = "math"
    form: Form = "boxed"
    """Form that ``format`` rewards: boxed, think (CW-GRPO), think_answer (GPG), think_closed, tags."""
    think_is_open: bool = False
    """The prompt ends with ``<think>``, by its response_prefix or by the chat template."""

    cosine_max_length: int = Field(default=1000, gt=0)
    """Characters over which the component cosine falls; in longer responses it rises again (open-rs)."""

    def build(self) -> Math:
        return Math(self)

    def made_up_problem(self, number: int, folder: Path) -> Problem:
        return sum_problem(number)


def sum_problem(number: int) -> Problem:
    """Make up a sum of small numbers."""
    left = number % 8 + 1
    right = number // 8 + 1
    total = str(left + right)
    return Problem(
        id=f"sum-{number}",
        question=f"What is {left} + {right}?",
        answer=total,
        metadata={"solution": f"{left}+{right}={total}"},
    )


class MathematicalAnswers:
    """Responses graded, and compared in a vote, as mathematics; ``config.form`` is the form rewarded."""

    config: Any

    def extract(self, response: str) -> str | None:
        answer = self._final_answer(response)
        return None if answer is None else normalized(answer)

    def score(self, problem: Problem, response: str) -> dict[str, float]:
        """Score ``accuracy``, 1 if the final answer equals the reference, and ``format``."""
        answer = self._final_answer(response)
        correct = answer is not None and SHARED.equal(problem.answer, answer)
        has_form = FORMS[self.config.form]
        return {"accuracy": float(correct), "format": has_form(self._with_opened_think(response))}

    def _final_answer(self, response: str) -> str | None:
        # If the prompt opens a thought and the response never closes it, the response has no answer.
        return final_answer(self._with_opened_think(response))

    def _with_opened_think(self, response: str) -> str:
        return with_opened_think(response, getattr(self.config, "think_is_open", False))

    def same_answer(self, first: str, second: str) -> bool | None:
        """Compare two extracted answers as mathematics; see `MathGrader.same`."""
        return SHARED.same(first, second)

    def undecided(self, reference: str, answer: str) -> bool:
        """Return True if a reference and an extracted answer had no verdict; see `MathGrader.undecided`."""
        return SHARED.undecided(reference, answer)


class MathFiles(MathematicalAnswers, FileTask):
    """Problems from files, graded as mathematics."""

    def __init__(self, config: FileTaskConfig) -> None:
        """Read the files, and warn of reference answers that no response can match."""
        super().__init__(config)
        problems = [*self.train, *self.validation]
        unanswerable = [problem for problem in problems if not _can_be_given(problem.answer)]
        if unanswerable:
            log.warning(
                "%d of %d problems can never be answered correctly, the first is %r: answer=%.60r has a "
                "brace without its partner, more than %d characters, more than %d levels of brackets, "
                "nothing but punctuation, or a number in a sentence; correct the answers or leave the "
                "problems out",
                len(unanswerable),
                len(problems),
                unanswerable[0].id,
                unanswerable[0].answer,
                MAX_CHARS,
                MAX_DEPTH,
            )


_SENTENCE = re.compile(r"(?<![\\A-Za-z])[A-Z]?[a-z]+(?:\s+[a-z]{2,}\s|:\s)")
"""A word before another one or a colon; no LaTeX command."""
_UPRIGHT = re.compile(r"\\text\s*\{[^{}]*\}")
"""Text beside a value, which math-verify leaves out."""


def _can_be_given(reference: str) -> bool:
    """Return True if a response is likely to match a reference, as text or as mathematics."""
    reference = answer_of(reference)
    words = _UPRIGHT.sub(" ", reference).replace("$", "")
    has_number = re.search(r"\d", reference) is not None
    if has_number and _SENTENCE.search(words):
        return False  # a response gives the number alone
    # A response that gives exactly the reference must be read as the reference.
    answer = final_answer(f"\\boxed{{{reference}}}")
    if answer is None or normalized(reference) == "":
        return False
    return normalized(answer) == normalized(reference)


class Math(MathFiles):
    """Mathematical problems with one answer each."""

    def score(self, problem: Problem, response: str) -> dict[str, float]:
        """Add ``cosine``, which rewards short responses, by the formula in rewards.py and gpg.py of open-rs.

        With L the length in characters:  cosine = 1/4 (1 + cos(pi L / cosine_max_length)) + base
        where base = 0.5 for a correct answer, -0.5 for a wrong one.
        """
        scores = super().score(problem, response)
        # The bonus falls from 0.5 for an empty response to 0 at the maximum length.
        length_bonus = (1 + math.cos(math.pi * len(response) / self.config.cosine_max_length)) / 4
        base = 0.5 if scores["accuracy"] else -0.5
        return {**scores, "cosine": base + length_bonus}

    def demonstration(self, problem: Problem, rng: random.Random) -> str:
        """Write the problem's solution in the form that ``format`` rewards."""
        response = demonstrated_form(solution_of(problem), problem.answer, self.config.form)
        if self.config.think_is_open:
            return response.removeprefix("<think>")  # the prompt ends with it
        return response
