"""Freed memory goes back to the system."""

import ctypes
import re
from pathlib import Path

import pytest

from nemo_grpo.engine import heap

BLOCK = 100_000  # bytes; larger ones the C library gives back itself


def resident() -> int:
    """Bytes of this process in memory."""
    return int(re.findall(r"VmRSS:\s*(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
def test_memory_below_a_block_in_use_is_given_back() -> None:
    blocks = [b"x" * BLOCK for _ in range(2000)]
    del blocks[:-1]
    before = resident()
    heap.give_back()
    assert before - resident() > 1000 * BLOCK
    assert blocks == [b"x" * BLOCK]
