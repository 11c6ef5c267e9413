"""Rotary position embeddings, with transformers' scaled frequencies."""

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

SCALED = ("linear", "llama3", "yarn")
"""Scalings whose frequencies do not depend on the length of the sequence."""


def unsupported(config: Any) -> str | None:
    """Explain why rotations of this configuration cannot be computed, or return None."""
    parameters = _parameters(config)
    rope_type = parameters.get("rope_type", "default")
    if rope_type not in ("default", *SCALED):
        return f"rope_type={rope_type}"
    partial_factor = parameters.get("partial_rotary_factor")
    if partial_factor not in (None, 1.0):
        return f"partial_rotary_factor={partial_factor}"
    return None


def _parameters(config: Any) -> dict[str, Any]:
    # Transformers fills in keys that a config omits or has under an older name.
    config.standardize_rope_params()
    return dict(config.rope_parameters)


class RotaryTable:
    """Rotations by position, each computed once.

    Position p turns a head's values (x_j, x_{j + D/2}) by the angle p * frequency_j.
    """

    def __init__(self, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        parameters = _parameters(config)
        rope_type = parameters.get("rope_type", "default")
        if rope_type == "default":
            size = getattr(config, "head_dim", None)
            if size is None:
                size = config.hidden_size // config.num_attention_heads
            exponents = torch.arange(0, size, 2, dtype=torch.float) / size
            frequencies = 1.0 / (parameters["rope_theta"] ** exponents)
            scale = 1.0
        else:
            frequencies, scale = ROPE_INIT_FUNCTIONS[rope_type](config)
        self._frequencies = frequencies.to(device)
        self._scale = scale
        self._dtype = dtype
        self._table = torch.empty(0, device=device)

    def upto(self, length: int) -> Tensor:
        """Return [at least length, 2, D]: cosines and sines by position, as `rotate` takes them."""
        if len(self._table) < length:
            # Half more than requested, so that a long response does not extend the table at every step.
            new_length = length + len(self._table) // 2
            positions = torch.arange(new_length, device=self._frequencies.device, dtype=torch.float)
            # Angles are float32 for every dtype of the model: in 16 bits large positions would coincide.
            angles = positions[:, None] * self._frequencies
            cos = angles.cos()
            sin = angles.sin()
            # The minus sign of the rotation is stored in the table, so that `rotate` needs only two products.
            table = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], 1)
            self._table = (table * self._scale).to(self._dtype)
        return self._table


def rotate(heads: Tensor, rotations: Tensor) -> Tensor:
    """Turn every head by its token's position.

    Args:
        heads: [N, heads, D].
        rotations: [N or 1, 2, D], rows of `RotaryTable.upto`.
    """
    cos = rotations[:, :1]
    signed_sin = rotations[:, 1:]
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    return torch.addcmul(heads * cos, swapped, signed_sin)
