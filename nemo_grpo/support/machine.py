"""Abilities of this machine's processor, and control of the C library's heap.

The abilities are read from the processor's description. A choice by measured time could come out differently
when a run resumes, and change the numbers of the run.
"""

import ctypes
from functools import cache
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


@cache
def _words() -> frozenset[str]:
    """Collect the words of /proc/cpuinfo, such as vendor and flags. Without that file there are none."""
    return frozenset(_CPUINFO.read_text().split()) if _CPUINFO.exists() else frozenset()


def packs_weights() -> bool:
    """True if oneDNN's matrix products with packed weights are faster on this processor than torch's.

    GFLOP/s of one core, packed / torch's, for 16 rows and a weight [576, 1536]:

        processor                   FP32           BF16
        AMD EPYC with AVX512_BF16   68 / 49        131 / 92
        Intel Xeon with AMX         54 / 38        184 / 117

    On an Intel Xeon without AMX, torch's products (by MKL) were faster.
    """
    return not _words().isdisjoint({"AuthenticAMD", "amx_bf16"})


def has_bf16() -> bool:
    """True if the processor has BF16 matrix instructions; without them BF16 is slower than FP32."""
    return not _words().isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})


NARROWEST_BF16 = 256
"""Smallest hidden size for which BF16 is faster than FP32 on a processor with BF16 instructions.

CPU seconds of a step in BF16, divided by those in FP32: 1.06 at a hidden size of 64, .99 at 128, .67 at 256
and .58 at 384 on an AMD EPYC; 1.42 at 128 on an Intel Xeon with AMX.
"""


def precision(asked: str, width: int) -> str:
    """Return the requested precision, or for auto the faster one for a model of this hidden size."""
    if asked != "auto":
        return asked
    return "bfloat16" if has_bf16() and width >= NARROWEST_BF16 else "float32"


# Parameters of mallopt(3).
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_LARGEST_THRESHOLD = 2**31 - 1
_LARGEST_OLD_THRESHOLD = 2**25
"""Largest mmap threshold of an older glibc, which refuses a larger one and keeps its default."""


def keep_freed_memory() -> None:
    """Let the heap keep freed memory instead of returning large blocks to the system at once (glibc only).

    A training step allocates blocks of the same large sizes again and again. Every page of a block that comes
    from the system costs a page fault.
    """
    _call("mallopt", _TRIM_THRESHOLD, _LARGEST_THRESHOLD)
    if not _call("mallopt", _MMAP_THRESHOLD, _LARGEST_THRESHOLD):
        _call("mallopt", _MMAP_THRESHOLD, _LARGEST_OLD_THRESHOLD)


def release_freed_memory() -> None:
    """Give freed memory that the heap keeps back to the system (glibc only).

    The work between two updates (checkpoint, export, sampling) calls it, because its own blocks would come
    on top of the update's freed activations. The next update pays with page faults.
    """
    _call("malloc_trim", 0)


def _call(name: str, *arguments: int) -> int:
    """Call a function of the C library; 0 where it has none of this name."""
    function = getattr(ctypes.CDLL(None), name, None)
    return 0 if function is None else int(function(*arguments))
