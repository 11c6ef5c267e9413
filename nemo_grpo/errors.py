"""The one exception type for mistakes that a user can correct, and the search for the name that was meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

EXIT_USAGE = 2
"""Exit code of every command when its input is refused; nothing has been created or changed then."""


class UserError(ValueError):
    """Input that a rule refuses. The message says the rule, the value and the remedy, in one line."""


def first_line(error: Exception) -> str:
    """What another library's error says, without its further lines and full stop; else the error's name."""
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def as_yaml(value: object) -> str:
    """A scalar as a recipe spells it: ``null``, ``true``, ``0.5``, ``text``."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the nearest known name, or the list of all when none is near.

    Args:    name: what was written.  known: the names that are valid there.
    Returns: a text to append to an error message; empty when ``known`` is empty.
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; valid: {', '.join(names)}" if names else ""
