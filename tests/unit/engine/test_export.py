"""What is never exported."""

from __future__ import annotations

import math

import pytest
import torch

from nemo_grpo import UserError
from nemo_grpo.hf_folder import export, export_adapter


@pytest.mark.parametrize(
    ("value", "dtype"), [(math.nan, torch.float32), (-math.inf, torch.bfloat16), (1e5, torch.float16)]
)
def test_weights_that_are_not_finite_are_not_exported(tmp_path, value, dtype):
    tensors = [("empty", torch.zeros(0)), ("w", torch.tensor([1.0, value]))]
    with pytest.raises(UserError, match="hf is not written: w holds NaN or inf"):
        export(tensors, tmp_path, tmp_path / "hf", dtype, None)
    if dtype is torch.float32:
        with pytest.raises(UserError, match="hf-adapter is not written: w holds NaN or inf"):
            export_adapter(dict(tensors), tmp_path, tmp_path / "hf-adapter", None, dim=1, alpha=1)
    assert list(tmp_path.iterdir()) == []
