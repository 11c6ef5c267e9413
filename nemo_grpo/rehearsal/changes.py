"""One setting that a rehearsal changes."""

from typing import Any, NamedTuple


class Change(NamedTuple):
    """One key of the recipe that a rehearsal sets.

    Attributes: reason: why this recipe's value cannot stay; empty for what every rehearsal sets.
    """

    key: str
    value: Any
    reason: str = ""
