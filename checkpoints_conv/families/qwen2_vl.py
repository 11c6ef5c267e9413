"""Qwen2-VL and Qwen2.5-VL. The planner alone knows them: NeMo-RL loads, trains and exports them.

Parameters of the vision tower, merger included, are counted from the layers of the published modelling code:
a patch embedding without bias, blocks of two norms, a fused qkv and an output projection with biases and a
feed-forward layer with biases (two matrices in Qwen2-VL, three, gated, in 2.5), and a merger of one norm and
two linear layers over 2 x 2 patches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from checkpoints_conv.families.declaration import Declaration


def _qwen2_vl(vision: Mapping[str, Any], hidden_size: int) -> int:
    width = int(vision["embed_dim"])
    ffn = int(width * vision.get("mlp_ratio", 4))
    layer_norm = 2 * width  # with a bias
    return _tower(vision, width, layer_norm, 2 * width * ffn + ffn + width, hidden_size)


def _qwen2_5_vl(vision: Mapping[str, Any], hidden_size: int) -> int:
    width, ffn = int(vision["hidden_size"]), int(vision["intermediate_size"])
    return _tower(vision, width, width, 3 * width * ffn + 2 * ffn + width, int(vision["out_hidden_size"]))


def _tower(vision: Mapping[str, Any], width: int, norm: int, feed_forward: int, out: int) -> int:
    patch, frames = int(vision.get("patch_size", 14)), int(vision.get("temporal_patch_size", 2))
    block = 2 * norm + (width * 3 * width + 3 * width) + (width * width + width) + feed_forward
    merged = width * int(vision.get("spatial_merge_size", 2)) ** 2
    merger = norm + (merged * merged + merged) + (merged * out + out)
    embedding = 3 * frames * patch * patch * width
    return embedding + int(vision["depth"]) * block + merger


QWEN2_VL = Declaration(
    "Qwen2VLForConditionalGeneration",
    "qwen2_vl",
    has_qkv_bias=True,
    is_computed=False,
    table=None,
    vision_parameters=_qwen2_vl,
    is_bridged=False,
)
QWEN2_5_VL = Declaration(
    "Qwen2_5_VLForConditionalGeneration",
    "qwen2_5_vl",
    has_qkv_bias=True,
    is_computed=False,
    table=None,
    vision_parameters=_qwen2_5_vl,
)
