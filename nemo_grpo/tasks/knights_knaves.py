"""Knights and knaves with two people: knights speak the truth, knaves lie, find out who is which.

Small enough for a policy of half a million parameters, and still a task that reasoning helps: demonstrations
try the four worlds one after the other. The answer is positional (first speaker, second speaker), so that a
tiny model has no names to copy. Chance is 1/4.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import permutations
from typing import Literal

from nemo_grpo.tasks.base import Problem, TaskConfig, check_num_validation, is_held_out, stream
from nemo_grpo.tasks.logic_puzzles import checks
from nemo_grpo.tasks.response import exact_match, extract_answer, render_response

World = tuple[bool, bool]
"""(first is a knight, second is a knight)"""

NAMES = ("Ava", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana", "Ivy", "Jack")
WORLDS: tuple[World, ...] = ((True, True), (True, False), (False, True), (False, False))

STATEMENTS: dict[str, tuple[str, Callable[[bool, bool], bool]]] = {
    "knight": ("{other} is a knight", lambda me, other: other),
    "knave": ("{other} is a knave", lambda me, other: not other),
    "alike": ("{other} and I are alike", lambda me, other: me == other),
    "differ": ("{other} and I differ", lambda me, other: me != other),
    "both_knights": ("{other} and I are knights", lambda me, other: me and other),
    "both_knaves": ("{other} and I are knaves", lambda me, other: not me and not other),
    "some_knight": ("{other} or I is a knight", lambda me, other: me or other),
    "some_knave": ("{other} or I is a knave", lambda me, other: not me or not other),
    "if_me_other": ("if I am a knight so is {other}", lambda me, other: not me or other),
    "if_other_me": ("if {other} is a knight so am I", lambda me, other: not other or me),
    "only_me": ("I am the only knight", lambda me, other: me and not other),
    "only_other": ("{other} is the only knight", lambda me, other: other and not me),
}


def truths(statements: tuple[str, str], world: World) -> tuple[bool, bool]:
    """Which of the two statements are true in this world."""
    first, second = (STATEMENTS[kind][1] for kind in statements)
    return first(world[0], world[1]), second(world[1], world[0])


def solution(statements: tuple[str, str]) -> World | None:
    """The only world in which exactly the knights speak the truth; None if there are several or none."""
    worlds = [world for world in WORLDS if truths(statements, world) == world]
    return worlds[0] if len(worlds) == 1 else None


PUZZLES = tuple((a, b) for a in STATEMENTS for b in STATEMENTS if solution((a, b)) is not None)
"""The 72 pairs of statements with a unique solution."""


class KnightsKnavesConfig(TaskConfig):
    """Parameters of `KnightsKnaves`."""

    name: Literal["knights_knaves"] = "knights_knaves"
    split: Literal["problem", "statements"] = "problem"
    """Held-out puzzles: certain pairs of statements with certain names, or certain pairs with any names."""

    def build(self) -> KnightsKnaves:
        return KnightsKnaves(self)


class KnightsKnaves:
    """Two-person puzzles; 72 statement pairs x 90 ordered pairs of names, a fifth of them held out."""

    def __init__(self, config: KnightsKnavesConfig) -> None:
        self.config = config
        self._pairs = [pair for pair in PUZZLES if config.split == "problem" or not is_held_out(pair)]

    def train_problem(self, index: int, seed: int) -> Problem:
        rng = stream(self.config.name, seed, index)
        while True:
            problem = _problem(rng.choice(self._pairs), tuple(rng.sample(NAMES, 2)))
            if not self._is_validation(problem):
                return problem

    def validation_problems(self, num_problems: int) -> list[Problem]:
        everything = (_problem(pair, names) for pair in PUZZLES for names in permutations(NAMES, 2))
        held_out = [problem for problem in everything if self._is_validation(problem)]
        source = f"{self.config.name} with split={self.config.split}"
        check_num_validation(num_problems, len(held_out), source)
        stream(self.config.name, "validation").shuffle(held_out)
        return held_out[:num_problems]

    def demonstration(self, problem: Problem, rng: random.Random) -> str:
        """Tries worlds in a random order, ``true`` or ``lie`` for each speaker, up to the first that fits."""
        statements = problem.metadata["statements"]
        lines = []
        for world in rng.sample(WORLDS, len(WORLDS)):
            found = checks(truths(statements, world), world)
            lines.append(f"{_answer(world)}: {' '.join(found)}")
            if found[-1] == "ok":
                break
        return render_response("; ".join(lines), problem.answer)

    def extract(self, response: str) -> str | None:
        return extract_answer(response)

    def score(self, problem: Problem, response: str) -> dict[str, float]:
        return exact_match(problem.answer, response)

    def _is_validation(self, problem: Problem) -> bool:
        statements, names = problem.metadata["statements"], problem.metadata["names"]
        return is_held_out(statements if self.config.split == "statements" else (statements, names))


def _answer(world: World) -> str:
    return ", ".join("knight" if is_knight else "knave" for is_knight in world)


def _problem(statements: tuple[str, str], names: tuple[str, ...]) -> Problem:
    world = solution(statements)
    assert world is not None
    said = [
        f"{me}: {STATEMENTS[kind][0].format(other=other)}."
        for kind, me, other in zip(statements, names, reversed(names), strict=True)
    ]
    return Problem(
        id="-".join((*statements, *names)).lower(),
        question=" ".join(said),
        answer=_answer(world),
        metadata={"statements": statements, "names": names},
    )
