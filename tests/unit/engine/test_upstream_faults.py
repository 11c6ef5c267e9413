"""Faults of the oldest supported megatron-core that the engine works around.

A test fails when the oldest supported version has the fault no longer: then remove the workaround with it.
"""

import re
from pathlib import Path
from types import SimpleNamespace

import megatron.core
import pytest
import torch
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.tensor_parallel import mappings

ROOT = Path(__file__).parents[3]
OLDEST = re.findall(r"megatron-core>=([\d.]+)", (ROOT / "pyproject.toml").read_text())[0]
"""Oldest minor version of pyproject.toml."""

pytestmark = pytest.mark.skipif(
    not megatron.core.__version__.startswith(f"{OLDEST}."), reason=f"needs megatron-core {OLDEST}"
)


def test_a_strided_tensor_is_returned_without_the_sum_of_the_ranks(monkeypatch):
    """NVIDIA/Megatron-LM#5337; the contiguous copy in `PackableGPTModel._postprocess`."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, group: tensor.mul_(2))
    two_ranks = SimpleNamespace(size=lambda: 2)
    assert mappings._reduce(torch.ones(2, 3), two_ranks).sum() == 12
    assert mappings._reduce(torch.ones(2, 3).t(), two_ranks).sum() == 6  # not 12


def test_a_save_forks_a_process_per_file():
    """NVIDIA/Megatron-LM#3633; `policy_checkpoint.write_in_this_process`."""
    assert hasattr(FileSystemWriterAsync, "write_preloaded_data_multiproc")
