"""Knights and knaves with 2 to 8 people in Logic-RL's form, graded as its code does (TR-GRPO Table 5).

The release is verl/utils/reward_score/kk.py of Unakar/Logic-RL and of zhyang2226/AR-Lopti, whose splits
TR-GRPO uses.
"""

import hashlib
import random
import re
import unicodedata
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from nemo_grpo.support.errors import UserError
from nemo_grpo.tasks.base import ACCURACY, FORMAT, Problem, Task, distinct, is_held_out, stream
from nemo_grpo.tasks.jsonl import FileTask, FileTaskConfig
from nemo_grpo.tasks.logic_puzzles import (
    NAMES,
    Statement,
    World,
    attempts,
    describe,
    draw_statements,
    role,
    solutions,
)
from nemo_grpo.tasks.response import last_answer, outside_thinking, render_response
from nemo_grpo.tasks.rewards.format_reward import FORMS, with_opened_think

SPEAKER = "Assistant:"
"""Marker in Logic-RL's transcripts. Its release grades the text after the first one, even if the response
wrote it."""
People = Annotated[int, Field(ge=2, le=8)]
Roles = dict[str, bool]
"""Name in lower case -> is a knight."""
_ROLE = re.compile(
    r"(?<![\w'-])(?P<name>[^\W\d_][\w'-]{0,40})\s{0,5}(?:\bis\b|[:=]|->|-)\s{0,5}(?:\ban?\b|\bthe\b)?\s{0,5}"
    r"(?P<role>knight|knave)\b(?!'s\b|\s{1,5}or\b)",
    re.IGNORECASE,
)
_MARKDOWN = re.compile(r"[*_`]")
_DENIED = re.compile(r"\b(?:false|untrue|not true|not the case)\s{1,5}that\b", re.IGNORECASE)
ALL_RIGHT = 2.0
"""Value of the component ``answer`` if every role is right (TR-GRPO Table 5)."""
COMPLETE = -1.5
"""Value if everybody has a role and some are wrong: Table 5's "partially correct", as Logic-RL reads it."""
UNREADABLE = -2.0
"""Value if Logic-RL cannot read everybody's role from the answer."""


class LogicConfig(FileTaskConfig):
    """Parameters of `Logic`, or of `LogicFiles` if files are given."""

    reward_components: ClassVar = {
        "accuracy": ACCURACY,
        "format": FORMAT,
        "format_signed": "+1: the response has the form of task.form; -1: it does not (TR-GRPO Table 5)",
        "answer": "+2: everybody is right; -1.5: somebody is wrong; -2: somebody is missing, or a wrong form",
    }

    name: Literal["logic"] = "logic"
    people: tuple[People, ...] = Field(default=(3, 4, 5, 6, 7), min_length=1, strict=False)
    """Sizes of the training puzzles, equally often; not for files."""
    validation_people: tuple[People, ...] = Field(default=(2, 3, 4, 5, 6, 7, 8), min_length=1, strict=False)
    """Sizes of the held-out puzzles, in turn; metadata.num_people records each problem's size."""
    num_names: int = Field(default=len(NAMES), ge=2, le=len(NAMES))
    """Names to draw from; few make it easier for a small policy. Not for files."""
    form: Literal["tags", "think_answer"] = "tags"
    """The form rewarded. tags: every tag once, in order (Logic-RL); think_answer: and nothing else."""
    think_is_open: bool = False
    """The prompt ends with ``<think>``, by its response_prefix or by the chat template."""

    @model_validator(mode="after")
    def _has_names_for_everybody(self) -> Self:
        largest = max(*self.people, *self.validation_people)
        if self.num_names < largest:
            raise UserError(
                f"nemo_grpo.task.num_names={self.num_names} is too few for {largest} people; use {largest}"
            )
        return self

    def made_up(self, folder: Path, number: int) -> Self:
        """Use generated puzzles, which need no files."""
        return self.model_copy(update={"train_files": (), "validation_files": ()})

    def build(self) -> Task:
        if self.train_files or self.validation_files:
            return LogicFiles(self)
        return Logic(self)


class _Graded:
    config: LogicConfig

    def extract(self, response: str) -> str | None:
        roles = self._roles(with_opened_think(response, self.config.think_is_open))
        if roles is None:
            return None
        return ", ".join(f"{name} {role(is_knight)}" for name, is_knight in sorted(roles.items()))

    def score(self, problem: Problem, response: str) -> dict[str, float]:
        """Score a response; ``answer`` depends on form and words, as in Logic-RL, ``accuracy`` does not."""
        response = with_opened_think(response, self.config.think_is_open)
        reference = parse_roles(problem.answer)
        graded_part = response.split(SPEAKER, 1)[-1]
        well_formed = FORMS[self.config.form](graded_part)
        answer = graded(reference or {}, last_answer(graded_part) or "")
        return {
            "accuracy": float(all_right(reference, self._roles(response))),
            "format": well_formed,
            "format_signed": 1.0 if well_formed else -1.0,
            "answer": answer if well_formed else UNREADABLE,
        }

    def _roles(self, response: str) -> Roles | None:
        return parse_roles(last_answer(outside_thinking(response)) or "")


class LogicFiles(_Graded, FileTask):
    """Puzzles from JSONL files; the answer is ``(1) Zoey is a knight`` and so on, one line each."""

    def __init__(self, config: LogicConfig) -> None:
        super().__init__(config)
        self.check_answers(parse_roles, "gives nobody's role")


class Logic(_Graded):
    """Generated puzzles; a fifth of all sets of statements is held out, whatever the names."""

    def __init__(self, config: LogicConfig) -> None:
        self.config = config

    def train_problem(self, index: int, seed: int) -> Problem:
        rng = stream(self.config.name, seed, index)
        return self._draw(rng.choice(self.config.people), rng, held_out=False)

    def validation_problems(self, num_problems: int) -> list[Problem]:
        rng = stream(self.config.name, "validation")
        sizes = self.config.validation_people

        def draw(number: int) -> Problem:
            return self._draw(sizes[number % len(sizes)], rng, held_out=True)

        return distinct(draw, num_problems)

    def demonstration(self, problem: Problem, rng: random.Random) -> str:
        """Try worlds in a random order, ``true`` or ``lie`` for each speaker, up to the one that fits."""
        names = problem.metadata["names"]
        statements = problem.metadata["statements"]
        people = range(len(statements))
        # A world is a number whose bit ``person`` is set for a knight.
        numbers = list(range(1 << len(statements)))
        rng.shuffle(numbers)
        worlds = (tuple(bool(number >> person & 1) for person in people) for number in numbers)

        def describe_world(world: World) -> str:
            return " ".join(f"{name} {role(is_knight)}" for name, is_knight in zip(names, world, strict=True))

        return render_response(attempts(statements, worlds, describe_world), problem.answer)

    def _draw(self, num_people: int, rng: random.Random, *, held_out: bool) -> Problem:
        while True:
            statements = draw_statements(num_people, rng)
            if is_held_out(statements) == held_out:
                names = rng.sample(NAMES[: self.config.num_names], num_people)
                return _problem(statements, tuple(names), rng)


def _problem(statements: tuple[Statement, ...], names: tuple[str, ...], rng: random.Random) -> Problem:
    (world,) = solutions(statements)
    question = describe(statements, names, rng)
    lines = [
        f"({number}) {name} is a {role(is_knight)}"
        for number, (name, is_knight) in enumerate(zip(names, world, strict=True), 1)
    ]
    digest = hashlib.sha256(question.encode()).hexdigest()
    return Problem(
        id=f"{len(names)}-{digest[:16]}",
        question=question,
        answer="\n".join(lines),
        metadata={"num_people": len(names), "names": names, "statements": statements},
    )


def parse_roles(answer: str) -> Roles | None:
    """Read everybody's role, in any order, case and Markdown: ``Zoey is a knight``, ``ZOEY: **knight**``.

    Returns:
        None where nobody has a role, somebody has both, or a role is called false.
    """
    roles: Roles = {}
    # A response may write decomposed letters, or a typographic apostrophe.
    answer = unicodedata.normalize("NFC", answer).replace("\u2019", "'")
    answer = _MARKDOWN.sub("", answer)
    if _DENIED.search(answer):
        return None
    for match in _ROLE.finditer(answer):
        is_knight = match["role"].casefold() == "knight"
        if roles.setdefault(match["name"].casefold(), is_knight) != is_knight:
            return None
    return roles if roles else None


def all_right(reference: Roles | None, answer: Roles | None) -> bool:
    """Return True if everybody of the reference has the right role; further people do not matter."""
    if reference is None or answer is None:
        return False
    return reference.items() <= answer.items()


def graded(reference: Roles, answer: str) -> float:
    """Reward an answer, read as narrowly as by Logic-RL's release.

    Returns:
        `ALL_RIGHT`, `COMPLETE` or `UNREADABLE`. An answer is unreadable if a person is not named as in ``Zoey
        is a knight``, or if the number of the words knight and knave is not the number of people.
    """
    lower = answer.lower()
    if lower.count("knight") + lower.count("knave") != len(reference):
        return UNREADABLE
    roles: Roles = {}
    for name in reference:
        # The release reads each person's first claim, even if a later one contradicts it.
        claim = re.search(rf"\b{re.escape(name)}\b\s+is\s+a\s+\b(knight|knave)\b", answer, re.IGNORECASE)
        if claim is None:
            return UNREADABLE
        roles[name] = claim[1].lower() == "knight"
    return ALL_RIGHT if roles == reference else COMPLETE
