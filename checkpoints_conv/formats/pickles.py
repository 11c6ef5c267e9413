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

_OUT_OF_MEMORY = 1
"""Exit status of a child process that has no memory for a pickle."""
_OPCODES_OF_TENSORS = {
    "PROTO", "FRAME", "GLOBAL", "STACK_GLOBAL", "MARK", "STOP", "REDUCE", "BINPERSID", "MEMOIZE",
    "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "NONE", "NEWTRUE", "NEWFALSE", "BUILD",
    "BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE", "EMPTY_DICT",
    "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
}  # fmt: skip
"""Opcodes by which a tensor is described."""
_MAX_TENSOR_PICKLE = 4096
"""Largest size in bytes of a tensor's description, and largest place that it may use in the memo."""


@dataclass(frozen=True)
class StoredStorage:
    """Reference to a tensor storage in a torch.save archive.

    Attributes:
        dtype: dtype of the storage's elements.
        key: name of the archive's member that holds the storage.
        num_elements: number of elements of the storage.
    """

    dtype: Dtype
    key: str
    num_elements: int


def refused(file: str, name: str) -> UserError:
    """Make the error for a file whose pickle asks for a name that could run code."""
    return UserError(
        f"{file} asks for {name}, which no checkpoint needs; it may be malicious and was not read"
    )


class RefusingUnpickler(pickle.Unpickler):
    """An unpickler that knows a list of allowed names and refuses all other names.

    Attributes:
        allowed: (module, name) -> the object to use in its place.
        file: the file's name, for messages.
    """

    def __init__(self, stream: io.BufferedIOBase, allowed: dict[tuple[str, str], Any], file: str) -> None:
        super().__init__(stream)
        self.allowed = allowed
        self.file = file

    def find_class(self, module: str, name: str) -> Any:
        """Look a name up in the list."""
        try:
            return self.allowed[module, name]
        except KeyError:
            raise refused(self.file, f"{module}.{name}") from None

    def persistent_load(self, pid: Any) -> Any:
        """Read a reference to a storage of a torch.save archive."""
        kind, dtype, key, _device, num_elements = pid
        if kind != "storage" or not isinstance(dtype, Dtype):
            raise pickle.UnpicklingError(f"unknown reference {pid!r}")
        return StoredStorage(dtype, str(key), int(num_elements))


def load_guarded(path: Path, allowed: dict[tuple[str, str], Any]) -> Any:
    """Load a pickle file, after a child process has shown that loading it does no harm.

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
    """Return True if a child process dies or runs out of memory while it loads the pickle.

    Other errors do not count: the parent gets them itself when it loads.
    """
    with warnings.catch_warnings():
        # Python 3.12 warns that other threads do not survive a fork; the child uses none.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        try:
            # A crash of the child is an answer, not a report for the user.
            faulthandler.disable()
            # The parent's garbage may belong to threads, which a child lacks.
            gc.disable()
            _limit(num_bytes)
            load()
        except MemoryError:
            os._exit(_OUT_OF_MEMORY)
        except BaseException:
            # The parent gets the same error when it loads the pickle, and reports it.
            pass
        finally:
            # Not sys.exit: the parent's buffers and exit handlers must not run twice.
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return status != 0


def _limit(num_bytes: int) -> None:
    """Limit the further time and memory of this process to what a pickle of this size may need."""
    times = os.times()
    used_seconds = int(times.user + times.system)
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    used_memory = num_pages * os.sysconf("SC_PAGE_SIZE")
    _lower(resource.RLIMIT_CPU, used_seconds + 5 + num_bytes // (1 << 20))
    _lower(resource.RLIMIT_AS, used_memory + (1 << 30) + 64 * num_bytes)
    _lower(resource.RLIMIT_CORE, 0)


def _lower(kind: int, limit: int) -> None:
    """Set a limit of this process, unless a lower one holds already."""
    _soft_limit, hard_limit = resource.getrlimit(kind)
    if hard_limit != resource.RLIM_INFINITY:
        limit = min(limit, hard_limit)
    resource.setrlimit(kind, (limit, hard_limit))


def check_describes_tensor(pickled: bytes) -> None:
    """Refuse a pickle that does more than describe a tensor.

    There is one per chunk, too many to load each of them in a child process first.
    """
    if len(pickled) > _MAX_TENSOR_PICKLE:
        raise ValueError(f"{len(pickled)} bytes describe one tensor")
    for opcode, argument, _ in pickletools.genops(pickled):
        # A PUT makes the unpickler allocate its memo up to this place.
        memo_place = int(argument or 0) if "PUT" in opcode.name else 0
        if opcode.name not in _OPCODES_OF_TENSORS or memo_place > _MAX_TENSOR_PICKLE:
            raise ValueError(f"{opcode.name} in the description of a tensor")
