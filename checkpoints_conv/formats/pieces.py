"""Copying between files in pieces of a megabyte.

A piece is read, checked and written while it is in the processor's cache. The next piece reuses its memory,
because the first touch of fresh memory costs more than copying into it.
"""

import errno
import os
import resource
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from nemo_grpo.support.errors import UserError

PIECE_BYTES = 1 << 20
_MAX_BYTES_PER_CALL = 64 << 20
"""Bytes of one system call; Linux moves at most 2 GB at once."""
_MAX_VIEWS = 1024
"""Buffers of one system call: IOV_MAX of Linux."""


class Buffer:
    """Memory that grows to the largest piece, and that every piece reuses."""

    def __init__(self) -> None:
        self._memory = bytearray()

    def take(self, num_bytes: int) -> memoryview:
        """Return writable memory, valid until the next call."""
        if num_bytes > len(self._memory):
            self._memory = bytearray(num_bytes)
        return memoryview(self._memory)[:num_bytes]


def damaged(file: Path, reason: str) -> UserError:
    """Make the error for a damaged file."""
    return UserError(f"{file} is damaged or truncated: {reason:.300}; copy or download it again")


def same(first: memoryview, second: memoryview) -> bool:
    """Return True if all bytes are equal."""
    if len(first) != len(second):
        return False
    # Python compares memory element by element, so elements of eight bytes take an eighth of the time.
    end = len(first) // 8 * 8
    return first[:end].cast("Q") == second[:end].cast("Q") and first[end:] == second[end:]


def open_all(files: Iterable[Path]) -> dict[Path, int]:
    """Open files to read, after raising the limit of open files as far as the system allows.

    A checkpoint of 512 ranks has more files than the usual limit of 1024.
    """
    _soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    descriptors: dict[Path, int] = {}
    try:
        for file in files:
            descriptors[file] = os.open(file, os.O_RDONLY)
    except OSError as error:
        close_all(descriptors)
        if error.errno != errno.EMFILE:
            raise UserError(
                f"{error.filename} cannot be read ({error.strerror}); copy it again, or change its mode"
            ) from None
        raise UserError(
            f"{len(descriptors)} files are open and more are needed, but the limit is {hard_limit}; raise it "
            "with ulimit -Hn"
        ) from None
    return descriptors


def close_all(descriptors: dict[Path, int]) -> None:
    """Close files, and remove them from the dictionary."""
    while descriptors:
        os.close(descriptors.popitem()[1])


def read_into(descriptor: int, offset: int, buffer: memoryview) -> int:
    """Fill the buffer from a file.

    Returns: number of bytes read; fewer than the buffer's only at the end of the file.
    """
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done : done + _MAX_BYTES_PER_CALL]], offset + done)
        if not count:
            break
        done += count
    return done


def scatter_into(descriptor: int, offset: int, views: Sequence[memoryview]) -> None:
    """Fill equally long views, one after the other, from an offset of a file; stop at the end of the file."""
    for first in range(0, len(views), _MAX_VIEWS):
        batch = views[first : first + _MAX_VIEWS]
        num_bytes = len(batch) * len(batch[0])
        if os.preadv(descriptor, batch, offset) != num_bytes:
            # One call reads at most 2 GB. Reading the views one by one stops only at the end of the file.
            for number, view in enumerate(batch):
                read_into(descriptor, offset + number * len(view), view)
        offset += num_bytes


def write_from(descriptor: int, offset: int, buffer: memoryview) -> None:
    """Write the whole buffer at an offset."""
    done = 0
    while done < len(buffer):
        done += os.pwrite(descriptor, buffer[done : done + _MAX_BYTES_PER_CALL], offset + done)


def crc32_of(descriptor: int, offset: int, num_bytes: int, crc32: int = 0) -> int:
    """Continue the checksum ``crc32`` over a part of a file, or up to its end if that comes first."""
    buffer = Buffer()
    for start in range(0, num_bytes, PIECE_BYTES):
        piece = buffer.take(min(PIECE_BYTES, num_bytes - start))
        num_read = read_into(descriptor, offset + start, piece)
        crc32 = zlib.crc32(piece[:num_read], crc32)
    return crc32
