"""Pickles without the classes in them: read by a list of what is known, written by name.

Reading a checkpoint must not run what a pickle asks for; and neither reading nor writing should need torch
and torch.distributed, which take seconds to import.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from checkpoints_conv.formats.dtypes import Dtype
from nemo_grpo.errors import UserError


@dataclass(frozen=True)
class StoredStorage:
    """A reference to a storage of a torch.save archive."""

    dtype: Dtype
    key: str
    num_elements: int


def refused(where: str, what: str) -> UserError:
    """The error of a pickle in the file ``where`` that asks for code."""
    return UserError(
        f"{where} asks for {what}, which no checkpoint needs; it may be malicious and was not read"
    )


class RefusingUnpickler(pickle.Unpickler):
    """An unpickler that knows the names it is given and refuses every other."""

    def __init__(self, stream: io.BufferedIOBase, allowed: dict[tuple[str, str], Any], where: str) -> None:
        super().__init__(stream)
        self.allowed, self.where = allowed, where

    def find_class(self, module: str, name: str) -> Any:
        """Answer from the list.

        Raises: UserError: the name is not on it.
        """
        try:
            return self.allowed[module, name]
        except KeyError:
            raise refused(self.where, f"{module}.{name}") from None

    def persistent_load(self, pid: Any) -> Any:
        """Storages of a torch.save archive."""
        kind, dtype, key, _device, num_elements = pid
        if kind != "storage" or not isinstance(dtype, Dtype):
            raise pickle.UnpicklingError(f"unknown reference {pid!r}")
        return StoredStorage(dtype, str(key), int(num_elements))


@dataclass(frozen=True)
class Global:
    """A class or function, by name."""

    module: str
    name: str


@dataclass(frozen=True)
class Call:
    """What a function returns."""

    function: Global
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, eq=False)
class Instance:
    """An object that is made without arguments and then given its state; may be a key of a dict."""

    kind: Global
    state: Any


@dataclass(frozen=True)
class Reference:
    """What the reader's persistent_load returns."""

    identifier: tuple[Any, ...]


def dumps(tree: Any) -> bytes:
    """Pickle plain values, and the classes above, by protocol 2, which every reader of torch accepts."""
    out = io.BytesIO()
    out.write(pickle.PROTO + b"\x02")
    _write(tree, out.write, {})
    out.write(pickle.STOP)
    return out.getvalue()


def _write(tree: Any, put: Any, known: dict[Any, int]) -> None:
    """One value. Args: known: position in the reader's memo of the names and texts that were there before."""
    if isinstance(tree, str | Global):
        if tree in known:
            put(pickle.LONG_BINGET + struct.pack("<I", known[tree]))
            return
        if isinstance(tree, str):
            text = tree.encode()
            put(pickle.BINUNICODE + struct.pack("<I", len(text)) + text)
        else:
            put(pickle.GLOBAL + f"{tree.module}\n{tree.name}\n".encode())
        known[tree] = len(known)
        put(pickle.LONG_BINPUT + struct.pack("<I", known[tree]))
    elif tree is None:
        put(pickle.NONE)
    elif isinstance(tree, bool):
        put(pickle.NEWTRUE if tree else pickle.NEWFALSE)
    elif isinstance(tree, int):
        number = tree.to_bytes(tree.bit_length() // 8 + 1, "little", signed=True)
        put(pickle.LONG1 + bytes([len(number)]) + number)
    elif isinstance(tree, float):
        put(pickle.BINFLOAT + struct.pack(">d", tree))
    else:
        _write_compound(tree, put, known)


def _write_compound(tree: Any, put: Any, known: dict[Any, int]) -> None:
    def put_all(values: Iterable[Any]) -> None:
        for value in values:
            _write(value, put, known)

    if isinstance(tree, tuple):
        put(pickle.MARK)
        put_all(tree)
        put(pickle.TUPLE)
    elif isinstance(tree, list):
        put(pickle.EMPTY_LIST + pickle.MARK)
        put_all(tree)
        put(pickle.APPENDS)
    elif isinstance(tree, dict):
        put(pickle.EMPTY_DICT + pickle.MARK)
        put_all(part for item in tree.items() for part in item)
        put(pickle.SETITEMS)
    elif isinstance(tree, Call):
        put_all((tree.function, tree.arguments))
        put(pickle.REDUCE)
    elif isinstance(tree, Instance):
        put_all((tree.kind, ()))
        put(pickle.NEWOBJ)
        put_all((tree.state,))
        put(pickle.BUILD)
    else:
        assert isinstance(tree, Reference), tree
        put_all((tree.identifier,))
        put(pickle.BINPERSID)
