"""Knights and knaves with two people, in few words: knights speak the truth, knaves lie.

The task is small enough for a policy of half a million parameters, and reasoning still helps: demonstrations
try the four worlds one after the other. The answer is positional (first speaker, second speaker), so that a
tiny model has no names to copy. Chance is 1/4.
"""

from __future__ import annotations

import random
from itertools import permutations
from typing import Literal

from nemo_grpo.tasks.base import Problem, TaskConfig, check_num_validation, is_held_out, stream
from nemo_grpo.tasks.logic_puzzles import Statement, World, attempts, role, solutions
from nemo_grpo.tasks.response import exact_match, extract_answer, render_response

NAMES = ("Ava", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana", "Ivy", "Jack")
WORLDS: tuple[World, ...] = ((True, True), (True, False), (False, True), (False, False))

STATEMENTS: dict[str, tuple[str, Statement]] = {
    "knight": ("{other} is a knight", ("is", (1, True))),
    "knave": ("{other} is a knave", ("is", (1, False))),
    "alike": ("{other} and I are alike", ("iff", (0, True), (1, True))),
    "differ": ("{other} and I differ", ("iff", (0, True), (1, False))),
    "both_knights": ("{other} and I are knights", ("and", (0, True), (1, True))),
    "both_knaves": ("{other} and I are knaves", ("and", (0, False), (1, False))),
    "some_knight": ("{other} or I is a knight", ("or", (0, True), (1, True))),
    "some_knave": ("{other} or I is a knave", ("or", (0, False), (1, False))),
    "if_me_other": ("if I am a knight so is {other}", ("if", (0, True), (1, True))),
    "if_other_me": ("if {other} is a knight so am I", ("if", (1, True), (0, True))),
    "only_me": ("I am the only knight", ("and", (0, True), (1, False))),
    "only_other": ("{other} is the only knight", ("and", (0, False), (1, True))),
}
"""Kind -> its English and its meaning, where the speaker is person 0."""


def meaning(kinds: tuple[str, str]) -> tuple[Statement, Statement]:
    """Return the statements of both people; person 1 speaks the second."""
    first_kind, second_kind = kinds
    _, first = STATEMENTS[first_kind]
    # `STATEMENTS` has the speaker as person 0; for the second speaker the two numbers change places.
    _, (operator, *atoms) = STATEMENTS[second_kind]
    swapped = [(1 - person, is_knight) for person, is_knight in atoms]
    return first, (operator, *swapped)  # type: ignore[return-value]


PUZZLES = tuple((a, b) for a in STATEMENTS for b in STATEMENTS if len(solutions(meaning((a, b)))) == 1)
"""The 72 pairs of statements with a unique solution."""


class KnightsKnavesConfig(TaskConfig):
    """Parameters of `KnightsKnaves`."""

    name: Literal["knights_knaves"] = "knights_knaves"
    split: Literal["problem", "statements"] = "problem"
    """Key by which a fifth is held out. problem: pair of statements and names; statements: pair alone."""

    def build(self) -> KnightsKnaves:
        return KnightsKnaves(self)


class KnightsKnaves:
    """Two-person puzzles; 72 statement pairs x 90 ordered pairs of names, a fifth of them held out."""

    def __init__(self, config: KnightsKnavesConfig) -> None:
        self.config = config
        self._training_pairs = list(PUZZLES)
        if config.split == "statements":
            self._training_pairs = [pair for pair in PUZZLES if not is_held_out(pair)]

    def train_problem(self, index: int, seed: int) -> Problem:
        rng = stream(self.config.name, seed, index)
        while True:
            problem = _problem(rng.choice(self._training_pairs), tuple(rng.sample(NAMES, 2)))
            if not self._is_validation(problem):
                return problem

    def validation_problems(self, num_problems: int) -> list[Problem]:
        all_problems = (_problem(pair, names) for pair in PUZZLES for names in permutations(NAMES, 2))
        held_out = [problem for problem in all_problems if self._is_validation(problem)]
        source = f"{self.config.name} with split={self.config.split}"
        check_num_validation(num_problems, len(held_out), source)
        # Shuffled, so that a short validation has puzzles of all kinds.
        stream(self.config.name, "validation").shuffle(held_out)
        return held_out[:num_problems]

    def demonstration(self, problem: Problem, rng: random.Random) -> str:
        """Try worlds in a random order, ``true`` or ``lie`` for each speaker, up to the first that fits."""
        worlds = rng.sample(WORLDS, len(WORLDS))
        reasoning = attempts(meaning(problem.metadata["statements"]), worlds, _answer)
        return render_response(reasoning, problem.answer)

    def extract(self, response: str) -> str | None:
        return extract_answer(response)

    def score(self, problem: Problem, response: str) -> dict[str, float]:
        return exact_match(problem.answer, response)

    def _is_validation(self, problem: Problem) -> bool:
        statements = problem.metadata["statements"]
        if self.config.split == "statements":
            return is_held_out(statements)
        return is_held_out((statements, problem.metadata["names"]))


def _answer(world: World) -> str:
    return ", ".join(map(role, world))


def _problem(statements: tuple[str, str], names: tuple[str, ...]) -> Problem:
    (world,) = solutions(meaning(statements))
    lines = [
        f"{speaker}: {STATEMENTS[kind][0].format(other=neighbour)}."
        for kind, speaker, neighbour in zip(statements, names, reversed(names), strict=True)
    ]
    return Problem(
        id="-".join((*statements, *names)).lower(),
        question=" ".join(lines),
        answer=_answer(world),
        metadata={"statements": statements, "names": names},
    )
