"""Rotary position embeddings, with transformers' scaled frequencies."""

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

SCALED = ("linear", "llama3", "yarn")
"""Scalings whose frequencies do not depend on the length of the sequence."""


def unsupported(config: Any) -> str | None:
    """Explain why rotations of this configuration cannot be computed; None: they can."""
    kind = _parameters(config).get("rope_type", "default")
    if kind not in ("default", *SCALED):
        return f"rope_type={kind}"
    if _parameters(config).get("partial_rotary_factor") not in (None, 1.0):
        return f"partial_rotary_factor={_parameters(config)['partial_rotary_factor']}"
    return None


def _parameters(config: Any) -> dict[str, Any]:
    config.standardize_rope_params()
    return dict(config.rope_parameters)


class RotaryTable:
    """Rotations by position, each computed once.

    Position p turns a head's values (x_j, x_{j + D/2}) by the angle p * frequency_j.
    """

    def __init__(self, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        kind, base = _parameters(config).get("rope_type", "default"), _parameters(config)["rope_theta"]
        if kind == "default":
            size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            frequencies, scale = 1.0 / (base ** (torch.arange(0, size, 2, dtype=torch.float) / size)), 1.0
        else:
            frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config)
        self._frequencies, self._scale = frequencies.to(device), scale
        self._dtype = dtype
        self._table = torch.empty(0, device=device)

    def upto(self, length: int) -> Tensor:
        """Return [at least length, 2, D]: cosines and sines by position, as `rotate` takes them."""
        if len(self._table) < length:  # grown by half, so that not every step of a long response grows it
            positions = torch.arange(
                length + len(self._table) // 2, device=self._frequencies.device, dtype=torch.float
            )
            angles = positions[:, None] * self._frequencies
            cos, sin = angles.cos(), angles.sin()
            table = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], 1)
            self._table = (table * self._scale).to(self._dtype)
        return self._table


def rotate(heads: Tensor, rotations: Tensor) -> Tensor:
    """Turn every head by its token's position.

    Args:    heads: [N, heads, D].  rotations: [N or 1, 2, D], rows of `RotaryTable.upto`.
    """
    cos, signed_sin = rotations[:, :1], rotations[:, 1:]
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    return torch.addcmul(heads * cos, swapped, signed_sin)
