"""A small world of invented people, for learning to search without any download.

Every fact is one passage (``The pet of Ava Stone is fox.``). A question asks for a fact of one person, or of
that person's friend. Only the passages hold the answer. Training and validation questions start from
different people.
"""

import random

from nemo_grpo.tasks.base import Problem, check_num_validation, distinct, is_held_out, stream
from nemo_grpo.tasks.retriever import Passage

FIRST_NAMES = (
    "Ava", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana", "Ivy", "Jack",
    "Kim", "Leo", "Mia", "Ned", "Olga", "Paul", "Rosa", "Sam", "Tess", "Yan",
)  # fmt: skip
LAST_NAMES = (
    "Ash", "Bell", "Cole", "Dale", "East", "Ford", "Gale", "Hill", "Ives", "Judd",
    "Knox", "Lane", "Moss", "Nash", "Orr", "Pike", "Reed", "Stone", "Tate", "West",
)  # fmt: skip
VALUES: dict[str, tuple[str, ...]] = {
    "pet": ("fox", "cat", "dog", "owl", "horse", "snake", "mouse", "goat", "crow", "hare", "frog", "bee"),
    "job": ("baker", "pilot", "nurse", "judge", "smith", "actor", "miner", "tailor", "clerk", "poet"),
    "city": ("Oslo", "Rome", "Lima", "Cairo", "Delhi", "Paris", "Quito", "Tokyo", "Accra", "Bern"),
    "colour": ("red", "blue", "green", "black", "white", "brown", "pink", "grey", "gold", "violet"),
}
FRIEND = "friend"


class Facts:
    """All people by name, each with the relations of `VALUES` and a friend's name; the same in every run.

    Args: hops: number of facts that a question needs, drawn uniformly; 1: a person's, 2: a friend's.
    """

    def __init__(self, name: str, hops: tuple[int, ...]) -> None:
        self.name, self.hops = name, hops
        names = [f"{first} {last}" for first in FIRST_NAMES for last in LAST_NAMES]
        rng = stream(name, "people")
        self.people = {
            name: {FRIEND: rng.choice([other for other in names if other != name])}
            | {relation: rng.choice(values) for relation, values in VALUES.items()}
            for name in names
        }
        self._asked = {
            held_out: [name for name in names if is_held_out(name) == held_out] for held_out in (False, True)
        }

    def passages(self) -> list[Passage]:
        """Make a passage for each fact."""
        return [
            # Titled, so that a person's own passages come before those that only mention the name.
            Passage(f"{name}/{relation}", name, f"The {relation} of {name} is {person[relation]}.")
            for name, person in self.people.items()
            for relation in (*VALUES, FRIEND)
        ]

    def train_problem(self, index: int, seed: int) -> Problem:
        return self._draw(stream(self.name, seed, index), held_out=False)

    def validation_problems(self, num_problems: int) -> list[Problem]:
        available = len(self._asked[True]) * len(VALUES) * len(set(self.hops))
        check_num_validation(num_problems, available, f"{self.name} without files")
        rng = stream(self.name, "validation")
        return distinct(lambda _: self._draw(rng, held_out=True), num_problems)

    def queries(self, problem: Problem) -> list[str]:
        """List the searches that lead to the answer, one for each hop."""
        name, relation, hops = (problem.metadata[key] for key in ("person", "relation", "hops"))
        if hops == 1:
            return [f"{relation} of {name}"]
        return [f"{FRIEND} of {name}", f"{relation} of {self.people[name][FRIEND]}"]

    def _draw(self, rng: random.Random, *, held_out: bool) -> Problem:
        name, relation = rng.choice(self._asked[held_out]), rng.choice(list(VALUES))
        hops = rng.choice(self.hops)
        whose = name if hops == 1 else f"the {FRIEND} of {name}"
        answer = self.people[name if hops == 1 else self.people[name][FRIEND]][relation]
        return Problem(
            id=f"{relation}-{hops}-{name}".lower().replace(" ", "-"),
            question=f"What is the {relation} of {whose}?",
            answer=answer,
            metadata={"answers": [answer], "person": name, "relation": relation, "hops": hops},
        )
