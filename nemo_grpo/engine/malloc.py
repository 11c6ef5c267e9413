"""The C library's heap (glibc's; others stay as they are): what happens to memory that is freed."""

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_MOST, _MOST_BEFORE = 2**31 - 1, 2**25  # glibc once refused a larger mmap threshold


def keep() -> None:
    """Keep freed memory for the next allocation, instead of giving large blocks back at once.

    A training step allocates the same large blocks again and again; of one that is taken from the system anew
    each page costs a fault.
    """
    _call("mallopt", _TRIM_THRESHOLD, _MOST)
    _call("mallopt", _MMAP_THRESHOLD, _MOST) or _call("mallopt", _MMAP_THRESHOLD, _MOST_BEFORE)


def give_back() -> None:
    """Return what the heap keeps of freed memory.

    An update frees its activations block by block, and what is still in use between them keeps the heap as
    large as it was. What comes next in blocks of its own (a checkpoint, an export, the sampler's cache) would
    lie on top of it. The next update pays with page faults, so this is for where a step is left.
    """
    _call("malloc_trim", 0)


def _call(name: str, *arguments: int) -> int:
    """Call a function of the C library; 0 where it has none of this name."""
    function = getattr(ctypes.CDLL(None), name, None)
    return 0 if function is None else int(function(*arguments))
