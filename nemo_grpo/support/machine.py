"""This machine's processor, and the C library's heap.

The processor's abilities follow from its identity, so they are the same in every process of a run. A choice
by timing could fall differently when a run resumes, and change its numbers.
"""

import ctypes
from functools import cache
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


@cache
def _words() -> frozenset[str]:
    """Collect the words of the kernel's description: maker and flags; none where there is no such file."""
    return frozenset(_CPUINFO.read_text().split()) if _CPUINFO.exists() else frozenset()


def packs_weights() -> bool:
    """True if oneDNN's products with packed weights are faster here than torch's.

    GFLOP/s of one core, packed against torch's, for 16 rows and a weight [576, 1536]:

        processor                   FP32           BF16
        AMD EPYC with AVX512_BF16   68 / 49        131 / 92
        Intel Xeon with AMX         54 / 38        184 / 117

    On an Intel Xeon without AMX, torch's (MKL's) were the faster ones.
    """
    return not _words().isdisjoint({"AuthenticAMD", "amx_bf16"})


def has_bf16() -> bool:
    """True if the processor has BF16 matrix instructions; without them BF16 is slower than FP32."""
    return not _words().isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})


NARROWEST_BF16 = 256
"""Hidden size from which BF16 pays where the processor has instructions for it.

A step's CPU seconds in BF16 as a share of FP32's: on an AMD EPYC 1.06 at a width of 64, .99 at 128, .67 at
256 and .58 at 384; on an Intel Xeon with AMX 1.42 at 128.
"""


def precision(asked: str, width: int) -> str:
    """Return ``asked``, or for auto the faster precision for a model of this hidden size."""
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

    A training step allocates the same large blocks again and again; each page of a new one costs a fault.
    """
    _call("mallopt", _TRIM_THRESHOLD, _LARGEST_THRESHOLD)
    if not _call("mallopt", _MMAP_THRESHOLD, _LARGEST_THRESHOLD):
        _call("mallopt", _MMAP_THRESHOLD, _LARGEST_OLD_THRESHOLD)


def release_freed_memory() -> None:
    """Return freed memory that the heap keeps to the system (glibc only).

    For the work between updates (checkpoint, export, sampling), whose blocks would otherwise come on top of
    an update's freed activations. The next update pays with page faults.
    """
    _call("malloc_trim", 0)


def _call(name: str, *arguments: int) -> int:
    """Call a function of the C library; 0 where it has none of this name."""
    function = getattr(ctypes.CDLL(None), name, None)
    return 0 if function is None else int(function(*arguments))
