"""Who is a knight and who a knave: reading such answers, and grading them as Logic-RL's release does.

TR-GRPO Table 5 is that reward; the release is verl/utils/reward_score/kk.py of Unakar/Logic-RL and of
zhyang2226/AR-Lopti, whose splits TR-GRPO uses.
"""

import re
from functools import cache

Roles = dict[str, bool]
"""Name in lower case -> is a knight."""

_ROLE = re.compile(
    r"(?<![\w'-])(?P<name>[^\W\d_][\w'-]{0,40})\s{0,5}(?:\bis\b|[:=]|->|-)\s{0,5}(?:\ban?\b|\bthe\b)?\s{0,5}"
    r"(?P<role>knight|knave)\b",
    re.IGNORECASE,
)

ALL_RIGHT, COMPLETE, UNREADABLE = 2.0, -1.5, -2.0
"""TR-GRPO Table 5; its "partially correct" is Logic-RL's: everybody has a role, right or not."""


def parse_roles(answer: str) -> Roles | None:
    """Everybody's role, whatever the order and the letters' case: ``Zoey is a knight``, ``ZOEY: knight``.

    Returns: None where nobody has a role or somebody has both.
    """
    roles: Roles = {}
    for match in _ROLE.finditer(answer):
        is_knight = match["role"].casefold() == "knight"
        if roles.setdefault(match["name"].casefold(), is_knight) != is_knight:
            return None
    return roles or None


def all_right(reference: Roles | None, answer: Roles | None) -> bool:
    """Whether the answer gives everybody of the reference the right role; further people do not matter."""
    return reference is not None and answer is not None and reference.items() <= answer.items()


def graded(reference: Roles, answer: str) -> float:
    """The answer's reward, read as narrowly as Logic-RL's release reads it.

    2: everybody of the reference is right.  -1.5: everybody has a role, and somebody's is wrong.
    -2: somebody is not named as ``Zoey is a knight``, or the words knight and knave do not occur once for
    each person.
    """
    lower = answer.lower()
    if lower.count("knight") + lower.count("knave") != len(reference):
        return UNREADABLE
    claims = {name: _claim(name).search(answer) for name in reference}
    if not all(claims.values()):
        return UNREADABLE
    said = {name: claim[1].lower() == "knight" for name, claim in claims.items() if claim}
    return ALL_RIGHT if said == reference else COMPLETE


@cache
def _claim(name: str) -> re.Pattern[str]:
    return re.compile(rf"\b{re.escape(name)}\b\s+is\s+a\s+\b(knight|knave)\b", re.IGNORECASE)
