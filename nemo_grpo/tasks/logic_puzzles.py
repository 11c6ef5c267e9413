"""Knights and knaves for any number of people: statements, their unique solution, their English.

The puzzles have Logic-RL's form: everybody makes one statement about one or two people, by name.
reasoning-gym's generator is not used: its text is not Logic-RL's, it has no held-out part, and its stream
with seed 1 is the stream with seed 0 shifted by one problem.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import product

Atom = tuple[int, bool]
"""(person, is said to be a knight)"""
Statement = tuple[str, Atom, Atom] | tuple[str, Atom]
"""("is" | "is_not", atom) or ("and" | "or" | "if" | "iff", atom, atom)"""
World = tuple[bool, ...]
"""For each person: is a knight."""

NAMES = (
    "Aiden", "Amelia", "Aria", "Charlotte", "Daniel", "David", "Ella", "Emily", "Ethan", "Evelyn", "Grace",
    "Henry", "Isabella", "Jack", "Jacob", "James", "Liam", "Lily", "Lucas", "Luke", "Mason", "Mia", "Noah",
    "Olivia", "Owen", "Riley", "Samuel", "Scarlett", "Sofia", "Victoria", "William", "Zoey",
)  # fmt: skip
SAYINGS = (
    "{name} said that {content}.",
    '{name} said, "{content}."',
    "{name} told you that {content}.",
    '{name} remarked, "{content}".',
    'According to {name}, "{content}".',
    'As {name} put it, "{content}".',
    '"{content}," {name} declared.',
    '"{content}" - {name}.',
)
_TWO_PEOPLE = {
    "and": "{0} and {1}",
    "or": "{0} or {1}",
    "if": "if {0} then {1}",
    "iff": "{0} if and only if {1}",
}


def solutions(statements: tuple[Statement, ...]) -> list[World]:
    """List every world in which exactly the knights speak the truth."""
    num_people = len(statements)
    # A set of worlds is an integer with one bit per world, so that one operation treats all 2^people worlds.
    # This is for speed: drawing a puzzle for eight people tests many sets of statements.
    knights = _worlds_where_knight(num_people)
    all_worlds = (1 << (1 << num_people)) - 1
    consistent = all_worlds
    for person, statement in enumerate(statements):
        # A world is consistent where the statement is true if and only if its speaker is a knight: the bits
        # of both sets agree there. Exclusive or gives 1 where they differ.
        contradicted = knights[person] ^ _worlds_where_true(statement, knights, all_worlds)
        consistent &= all_worlds ^ contradicted
    # `product` counts with the last person as the lowest bit, but in `knights` the first person is.
    worlds = product((False, True), repeat=num_people)
    return [world[::-1] for number, world in enumerate(worlds) if consistent >> number & 1]


def is_true(statement: Statement, world: World) -> bool:
    """Return True if the statement holds in a world."""
    # The sets have a single bit here, for this world.
    return bool(_worlds_where_true(statement, tuple(map(int, world)), 1))


def attempts(
    statements: Sequence[Statement], worlds: Iterable[World], describe_world: Callable[[World], str]
) -> str:
    """Write a trial of worlds, in this order, up to the first world that fits.

    An example is ``WORLD: true lie no; WORLD: lie true ok``. A world's trial ends at the first statement that
    contradicts the world.
    """
    lines = []
    for world in worlds:
        words = []
        for statement, is_knight in zip(statements, world, strict=True):
            words.append("true" if is_true(statement, world) else "lie")
            if is_true(statement, world) != is_knight:
                words.append("no")
                break
        else:
            words.append("ok")
        lines.append(f"{describe_world(world)}: {' '.join(words)}")
        if words[-1] == "ok":
            break
    return "; ".join(lines)


def draw_statements(num_people: int, rng: random.Random) -> tuple[Statement, ...]:
    """Draw statements with exactly one solution, one for each person."""
    while True:
        statements = tuple(_draw_statement(speaker, num_people, rng) for speaker in range(num_people))
        if len(solutions(statements)) == 1:
            return statements


def describe(statements: tuple[Statement, ...], names: tuple[str, ...], rng: random.Random) -> str:
    """Write the puzzle's text; ``rng`` chooses how each statement is reported."""
    sentences = [
        rng.choice(SAYINGS).format(name=name, content=_english(statement, names))
        for name, statement in zip(names, statements, strict=True)
    ]
    inhabitants = f"{', '.join(names[:-1])}, and {names[-1]}"
    if len(names) == 2:
        inhabitants = f"{names[0]} and {names[1]}"
    return (
        "A very special island is inhabited only by knights and knaves. Knights always tell the truth, and "
        f"knaves always lie. You meet {len(names)} inhabitants: {inhabitants}. {' '.join(sentences)} "
        "So who is a knight and who is a knave?"
    )


@cache
def _worlds_where_knight(num_people: int) -> tuple[int, ...]:
    """Return for each person the worlds in which that person is a knight, a bit per world.

    World number w has the knights whose bits are set in w.
    """
    worlds = range(1 << num_people)
    return tuple(sum(1 << world for world in worlds if world >> person & 1) for person in range(num_people))


def _worlds_where_true(statement: Statement, knights: tuple[int, ...], all_worlds: int) -> int:
    """Return the worlds in which the statement holds, a bit per world.

    Args:
        statement: the statement.
        knights: for each person, the worlds in which that person is a knight.
        all_worlds: the set of all worlds.
    """
    kind, *atoms = statement
    first, *further = (
        knights[person] if is_knight else all_worlds ^ knights[person] for person, is_knight in atoms
    )
    match kind:
        case "is":
            return first
        case "is_not":
            return all_worlds ^ first
        case "and":
            return first & further[0]
        case "or":
            return first | further[0]
        case "if":
            return (all_worlds ^ first) | further[0]
        case _:
            return all_worlds ^ first ^ further[0]


def _draw_statement(speaker: int, num_people: int, rng: random.Random) -> Statement:
    """Draw a statement, each kind equally often, but never ``I am a knave``, which nobody can say."""
    kind = rng.choice(("is", "is_not", *_TWO_PEOPLE))
    if kind in _TWO_PEOPLE:
        first, second = rng.sample(range(num_people), 2)
        return kind, (first, rng.random() < 0.5), (second, rng.random() < 0.5)
    person = rng.randrange(num_people)
    is_knight = rng.random() < 0.5
    if person == speaker:
        is_knight = kind == "is"  # "I am a knight" or "I am not a knave"
    return kind, (person, is_knight)


def _english(statement: Statement, names: tuple[str, ...]) -> str:
    kind, *atoms = statement
    verb = "is not" if kind == "is_not" else "is"
    claims = [f"{names[person]} {verb} a {role(is_knight)}" for person, is_knight in atoms]
    if kind in _TWO_PEOPLE:
        return _TWO_PEOPLE[kind].format(*claims)
    return claims[0]


def role(is_knight: bool) -> str:
    """Name a role."""
    return "knight" if is_knight else "knave"
