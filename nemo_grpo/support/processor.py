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


def is_amd() -> bool:
    """Made by AMD."""
    return "AuthenticAMD" in _words()


def has_bf16() -> bool:
    """It multiplies BF16 matrices with instructions of its own; without them BF16 is slower than FP32."""
    return not _words().isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})


def precision(asked: str) -> str:
    """``asked``; auto is what the processor has instructions for."""
    if asked != "auto":
        return asked
    return "bfloat16" if has_bf16() else "float32"
