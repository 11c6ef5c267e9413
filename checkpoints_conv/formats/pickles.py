"""Pickles read by a list of allowed names, without their classes.

Reading a checkpoint must not run what a pickle asks for, and should not need torch and torch.distributed,
which take seconds to import.
"""

import faulthandler
import gc
import io
import os
import pickle
import pickletools
import resource
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints_conv.formats.dtypes import Dtype
from checkpoints_conv.formats.pieces import damaged
from nemo_grpo.support.errors import UserError

_FAILED = 1
_OF_TENSORS = {
    *("PROTO", "FRAME", "GLOBAL", "STACK_GLOBAL", "MARK", "STOP", "REDUCE", "BINPERSID", "MEMOIZE"),
    *("BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "NONE", "NEWTRUE", "NEWFALSE", "BUILD"),
    *("BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE", "EMPTY_DICT"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
}
"""Opcodes by which a tensor is described."""
_MAX_TENSOR_PICKLE = 4096


@dataclass(frozen=True)
class StoredStorage:
    """A reference to a storage of a torch.save archive."""

    dtype: Dtype
    key: str
    num_elements: int


def refused(where: str, what: str) -> UserError:
    """Make the error for a pickle in the file ``where`` that asks for code."""
    return UserError(
        f"{where} asks for {what}, which no checkpoint needs; it may be malicious and was not read"
    )


class RefusingUnpickler(pickle.Unpickler):
    """An unpickler that knows the names it is given and refuses every other."""

    def __init__(self, stream: io.BufferedIOBase, allowed: dict[tuple[str, str], Any], where: str) -> None:
        super().__init__(stream)
        self.allowed, self.where = allowed, where

    def find_class(self, module: str, name: str) -> Any:
        """Look a name up in the list."""
        try:
            return self.allowed[module, name]
        except KeyError:
            raise refused(self.where, f"{module}.{name}") from None

    def persistent_load(self, pid: Any) -> Any:
        """Read a reference to a storage of a torch.save archive."""
        kind, dtype, key, _device, num_elements = pid
        if kind != "storage" or not isinstance(dtype, Dtype):
            raise pickle.UnpicklingError(f"unknown reference {pid!r}")
        return StoredStorage(dtype, str(key), int(num_elements))


def load_guarded(path: Path, allowed: dict[tuple[str, str], Any]) -> Any:
    """Load a pickle file, which a child process reads first.

    Deeply nested keys overflow the C stack, others take for ever to hash, and a few bytes can ask for all of
    the memory; none of it is an exception.
    """

    def load() -> Any:
        with path.open("rb") as stream:
            return RefusingUnpickler(stream, allowed, str(path)).load()

    if _fails_in_child(load, path.stat().st_size):
        raise damaged(path, "its pickle overflows the stack, the memory or the time that its size allows")
    return load()


def _fails_in_child(load: Callable[[], Any], num_bytes: int) -> bool:
    """True if a child process dies or lacks memory while it loads; other errors are left to the parent."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads, which the child does not use
        child = os.fork()
    if not child:
        try:
            faulthandler.disable()
            gc.disable()  # the parent's garbage may belong to threads, which a child lacks
            _limit(num_bytes)
            load()
        except MemoryError:
            os._exit(_FAILED)
        except BaseException:
            pass  # the parent meets it, too
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return status != 0


def _limit(num_bytes: int) -> None:
    """Limit this process to the time and memory of a pickle of this size, beyond what it has taken."""
    spent = sum(os.times()[:2])
    memory = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    for kind, most in (
        (resource.RLIMIT_CPU, int(spent) + 5 + num_bytes // (1 << 20)),
        (resource.RLIMIT_AS, memory + (1 << 30) + 64 * num_bytes),
        (resource.RLIMIT_CORE, 0),
    ):
        _soft, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def check_of_tensor(pickled: bytes) -> None:
    """Refuse a pickle that does more than describe a tensor; there are too many for a child process each."""
    if len(pickled) > _MAX_TENSOR_PICKLE:
        raise ValueError(f"{len(pickled)} bytes describe one tensor")
    for opcode, argument, _ in pickletools.genops(pickled):
        place = int(argument or 0) if "PUT" in opcode.name else 0
        if opcode.name not in _OF_TENSORS or place > _MAX_TENSOR_PICKLE:
            raise ValueError(f"{opcode.name} in the description of a tensor")
