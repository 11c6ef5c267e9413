"""Abilities of this machine's processor, by its identity: the same in every process of a run.

A choice by timing could fall differently when a run resumes, and its numbers with it.
"""

from functools import cache
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


@cache
def _words() -> frozenset[str]:
    """Every word of the kernel's description: maker, flags; none where there is no such file."""
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
    """It multiplies BF16 matrices with instructions of its own; without them BF16 is slower than FP32."""
    return not _words().isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})


NARROWEST_BF16 = 256
"""Hidden size from which on BF16 pays where the processor has instructions for it.

A step's CPU seconds in BF16 as a share of FP32's: on an AMD EPYC 1.06 at a width of 64, .99 at 128, .67 at
256 and .58 at 384; on an Intel Xeon with AMX 1.42 at 128.
"""


def precision(asked: str, width: int) -> str:
    """``asked``; for auto the faster one for a model of this hidden size."""
    if asked != "auto":
        return asked
    return "bfloat16" if has_bf16() and width >= NARROWEST_BF16 else "float32"
