"""The dtypes that weights are converted to."""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_grpo.errors import UserError, did_you_mean

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CONFIG_NAMES = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
    torch.float64: "float64",
}


def dtype_for(name: str | None) -> torch.dtype | None:
    """The dtype of a ``--dtype`` value; None keeps what is stored.

    Raises: UserError: unknown name.
    """
    if name is None:
        return None
    if name not in DTYPES:
        raise UserError(f"--dtype {name!r} is not known{did_you_mean(name, DTYPES)}")
    return DTYPES[name]


def cast(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """The tensor in another dtype.

    Raises: UserError: a finite value became infinite (fp16 ends at 65504).
    """
    if tensor.dtype == dtype:
        return tensor
    out = tensor.to(dtype)
    if dtype == torch.float16 and bool((out.isinf() & tensor.isfinite()).any()):
        raise UserError(f"{name} has values beyond fp16's range (65504); use --dtype bf16 or fp32")
    return out
