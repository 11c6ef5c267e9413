"""The exception for mistakes that a user can correct, and parts of its messages."""

import difflib
import json
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

EXIT_USAGE = 2
"""Exit code of every command when its input is refused; nothing has been created or changed then."""


class UserError(ValueError):
    """Input that a rule refuses. The message says the rule, the value and the remedy, in one line."""


def first_line(error: Exception) -> str:
    """Return the first line of another library's error message, without its full stop.

    An error without a message gives the name of its class.
    """
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def how_ended(code: int) -> str:
    """Describe the end of a process by its return code: ``exit code 1``, or ``killed by SIGTERM``."""
    if code >= 0:
        return f"exit code {code}"
    memory = ", as the kernel does where memory runs out" if -code == signal.SIGKILL else ""
    return f"killed by {signal.Signals(-code).name}{memory}"


UNREADABLE = (OSError, ValueError, ArithmeticError, RecursionError, MemoryError)
"""Errors that parsers and pydantic raise for malformed input."""


@contextmanager
def reading(what: object, expected: str, remedy: str, *further: type[Exception]) -> Iterator[None]:
    """Turn errors of a parser within the block into a `UserError`.

    Args:
        what: File or other input that the block reads.
        expected: Form that the input should have, such as ``valid YAML``.
        remedy: Advice at the end of the message.
        further: Exceptions of the parser that are not in `UNREADABLE`.
    Raises: UserError: ``what is not expected (reason); remedy``.
    """
    try:
        yield
    except UserError:
        # The block's own message. A UserError is a ValueError, which the last clause would wrap.
        raise
    except OSError as error:
        raise UserError(f"{what} cannot be read ({error.strerror or first_line(error)}); {remedy}") from None
    except UNREADABLE + further as error:
        raise UserError(f"{what} is not {expected} ({_reason(error)}); {remedy}") from None


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, MemoryError):
        return "it does not fit in memory"
    if hasattr(error, "problem_mark"):
        # PyYAML's message shows the place in the file over several lines; our messages have one line.
        return " ".join(str(error).split())[:200]
    pydantic_details = getattr(error, "errors", None)
    if pydantic_details:
        # The first error is enough: a section of the wrong type has one for each of its keys.
        first = pydantic_details()[0]
        return f"{'.'.join(map(str, first['loc']))}={first['input']!r:.60}: {first['msg']}"
    return first_line(error)


def as_yaml(value: object) -> str:
    """Spell a scalar as in a recipe: ``null``, ``true``, ``0.5``, ``text``."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


MOST_NAMES = 24
"""Most valid names that a message lists."""


def shown(value: object) -> str:
    """Write a value as JSON, short enough for an error message."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def listed(names: Iterable[str], most: int = 8) -> str:
    """Write names in alphabetical order; of a longer list the first ``most`` and the number of all."""
    in_order = sorted(names)
    more = f", ... ({len(in_order)} in all)" if len(in_order) > most else ""
    return f"{', '.join(in_order[:most])}{more}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Suggest the valid name that is nearest to an invalid one, or list the valid names if none is near.

    Args:
        name: The invalid name.
        known: The valid names.
    Returns: the end of an error message, such as ``"; did you mean 'x'?"``; empty without valid names.
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; valid: {listed(names, MOST_NAMES)}" if names else ""
