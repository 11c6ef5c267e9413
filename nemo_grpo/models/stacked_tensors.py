"""Tensors of which a conversion takes one piece after the other, and what the pieces are called.

``x[0]``, ``x[1]``, ... are the places on the leading axis of the tensor ``x``; ``x[a]``, ``x[b]``, ...
blocks of its rows.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, TypeVar

Named = TypeVar("Named", bound=tuple[Any, ...])


def whole_name(name: str) -> str:
    """Name of the tensor to which a piece belongs; a whole tensor's own."""
    return name.partition("[")[0]


def is_piece(name: str) -> bool:
    """True for a piece of a tensor."""
    return "[" in name


def is_numbered(name: str) -> bool:
    """True for a place on the leading axis, False for a block of rows."""
    return name.partition("[")[2][:-1].isdigit()


def grouped(named: Iterable[Named]) -> Iterator[tuple[str, list[Named]]]:
    """The tensors that pieces make up, each with its pieces. Args: named: tuples that begin with a name."""
    for whole, group in groupby(named, key=lambda one: whole_name(one[0])):
        yield whole, list(group)


def whole_shape(names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Shape of the tensor that consists of these pieces."""
    if not is_piece(names[0]):
        return shapes[0]
    if is_numbered(names[0]):
        return len(names), *shapes[0]
    return sum(shape[0] for shape in shapes), *shapes[0][1:]
