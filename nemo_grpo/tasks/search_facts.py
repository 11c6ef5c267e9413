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

    Args:
        name: the task's, which seeds the random streams.
        hops: numbers of facts that a question may need, drawn uniformly. 1: a person's; 2: a friend's.
    """

    def __init__(self, name: str, hops: tuple[int, ...]) -> None:
        self.name = name
        self.hops = hops
        full_names = [f"{first} {last}" for first in FIRST_NAMES for last in LAST_NAMES]
        rng = stream(name, "people")
        self.people: dict[str, dict[str, str]] = {}
        for person in full_names:
            relations = {FRIEND: rng.choice([friend for friend in full_names if friend != person])}
            for relation, values in VALUES.items():
                relations[relation] = rng.choice(values)
            self.people[person] = relations
        self._training_people = [person for person in full_names if not is_held_out(person)]
        self._validation_people = [person for person in full_names if is_held_out(person)]

    def passages(self) -> list[Passage]:
        """Make a passage for each fact."""
        return [
            # The name is also the title, so that a person's own passages rank above mentions in others.
            Passage(f"{name}/{relation}", name, f"The {relation} of {name} is {person[relation]}.")
            for name, person in self.people.items()
            for relation in (*VALUES, FRIEND)
        ]

    def train_problem(self, index: int, seed: int) -> Problem:
        return self._draw(stream(self.name, seed, index), held_out=False)

    def validation_problems(self, num_problems: int) -> list[Problem]:
        available = len(self._validation_people) * len(VALUES) * len(set(self.hops))
        check_num_validation(num_problems, available, f"{self.name} without files")
        rng = stream(self.name, "validation")
        return distinct(lambda _: self._draw(rng, held_out=True), num_problems)

    def queries(self, problem: Problem) -> list[str]:
        """List the searches that lead to the answer, one for each hop."""
        person = problem.metadata["person"]
        relation = problem.metadata["relation"]
        if problem.metadata["hops"] == 1:
            return [f"{relation} of {person}"]
        return [f"{FRIEND} of {person}", f"{relation} of {self.people[person][FRIEND]}"]

    def _draw(self, rng: random.Random, *, held_out: bool) -> Problem:
        person = rng.choice(self._validation_people if held_out else self._training_people)
        relation = rng.choice(list(VALUES))
        hops = rng.choice(self.hops)
        if hops == 1:
            described_person = person
            answer = self.people[person][relation]
        else:
            described_person = f"the {FRIEND} of {person}"
            friend = self.people[person][FRIEND]
            answer = self.people[friend][relation]
        return Problem(
            id=f"{relation}-{hops}-{person}".lower().replace(" ", "-"),
            question=f"What is the {relation} of {described_person}?",
            answer=answer,
            metadata={"answers": [answer], "person": person, "relation": relation, "hops": hops},
        )
