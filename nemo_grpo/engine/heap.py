"""Memory that has been freed, back to the system."""

import ctypes


def give_back() -> None:
    """Return what the heap keeps of freed memory, where the C library (glibc) can.

    An update frees its activations block by block, and what is still in use between them keeps the heap as
    large as it was. What comes next in blocks of its own (a checkpoint, an export, the sampler's cache) would
    lie on top of it. The next update pays with page faults, so this is for where a step is left.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
