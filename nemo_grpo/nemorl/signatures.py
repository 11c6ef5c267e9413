"""Argument lists as plain texts: what a function takes, how a call gives, and whether the two fit.

A function is a list of words, ``["data", "timer=", "*", "mbs=", "**more"]``; a call is its arguments without
their values, ``(_, *, prefix=_, **)``.
"""

import ast
import inspect
from collections.abc import Iterator
from typing import Any

Parameter = inspect.Parameter


def shape(call: ast.Call) -> str:
    """A call's arguments."""
    parts = ["*" if isinstance(argument, ast.Starred) else "_" for argument in call.args]
    named = sorted(f"{keyword.arg}=_" for keyword in call.keywords if keyword.arg)
    return f"({', '.join([*parts, *named, *(['**'] * any(not k.arg for k in call.keywords))])})"


def misfit(parameters: list[str], call: str) -> str:
    """Why a call does not fit; empty if it does. What ``*`` and ``**`` hold fits."""
    words = [word.strip() for word in call.strip("()").split(",") if word.strip()]
    named = {word.partition("=")[0]: None for word in words if "=" in word}
    num_given = words.count("_")
    signature = inspect.Signature(list(_signed(parameters)))
    is_open = any(word.startswith("*") for word in words)
    try:
        (signature.bind_partial if is_open else signature.bind)(*[None] * num_given, **named)
    except TypeError as error:
        return str(error)
    return ""


def _signed(parameters: list[str]) -> Iterator[Parameter]:
    """Words as Python's own parameters."""
    by: Any = Parameter.POSITIONAL_ONLY if "/" in parameters else Parameter.POSITIONAL_OR_KEYWORD
    for word in parameters:
        name, is_optional = word.rstrip("="), word.endswith("=")
        if name == "*":
            by = Parameter.KEYWORD_ONLY
        elif name == "/":
            by = Parameter.POSITIONAL_OR_KEYWORD
        elif name.startswith("**"):
            yield Parameter(name[2:], Parameter.VAR_KEYWORD)
        elif name.startswith("*"):
            yield Parameter(name[1:], Parameter.VAR_POSITIONAL)
            by = Parameter.KEYWORD_ONLY
        else:
            yield Parameter(name, by, default=None if is_optional else Parameter.empty)


def listed(arguments: ast.arguments) -> list[str]:
    """A function's parameters."""
    plain = [*arguments.posonlyargs, *arguments.args]
    first_default = len(plain) - len(arguments.defaults)
    words = [f"{a.arg}{'=' * (place >= first_default)}" for place, a in enumerate(plain)]
    if arguments.posonlyargs:
        words.insert(len(arguments.posonlyargs), "/")
    if arguments.vararg:
        words.append(f"*{arguments.vararg.arg}")
    elif arguments.kwonlyargs:
        words.append("*")
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    words += [f"{a.arg}{'=' * (default is not None)}" for a, default in pairs]
    return words + ([f"**{arguments.kwarg.arg}"] if arguments.kwarg else [])
