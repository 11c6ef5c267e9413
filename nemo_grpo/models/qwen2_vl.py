"""Qwen2.5-VL, and Qwen2-VL only for the planner: Megatron-Bridge, which NeMo-RL trains with, lacks it.

The decoder is Qwen2's. Megatron-Bridge puts the vision tower and its merger into the model as transformers
builds them: neither stacked nor split over ranks, every tensor under its Hugging Face name.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from nemo_grpo.models.family_spec import FamilySpec, window_of_later_layers
from nemo_grpo.models.shared_mappings import Entry, copy, decoder_table
from nemo_grpo.models.spec import ModelSpec

_PROVIDER = "megatron.bridge.models.qwen_vl.qwen25_vl_provider.Qwen25VLModelProvider"
_VISION_CONFIG = "transformers.models.qwen2_5_vl.configuration_qwen2_5_vl.Qwen2_5_VLVisionConfig"
_DEFAULTS = {"rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5, "max_window_layers": 80}
"""Values that transformers takes where config.json does not say."""
_ID_KEYS = ("bos_token_id", "eos_token_id")
_MARKS = {
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "image_token_id": 151655,
    "video_token_id": 151656,
}
"""Keys of the tokens around and in place of pictures -> transformers' default ids."""


def _qwen2_5_vl_sizes(config: Mapping[str, Any]) -> dict[str, int]:
    vision = config["vision_config"]
    return _sizes(vision, vision["hidden_size"], vision["intermediate_size"], vision["out_hidden_size"])


def _qwen2_vl_sizes(config: Mapping[str, Any]) -> dict[str, int]:
    # Qwen2-VL's hidden_size is the decoder's; the tower's width is embed_dim.
    vision = config["vision_config"]
    text_config = config.get("text_config") or config
    width = vision["embed_dim"]
    return _sizes(vision, width, width * vision.get("mlp_ratio", 4), text_config["hidden_size"])


def _sizes(vision: Mapping[str, Any], width: int, mlp_width: int, out_width: int) -> dict[str, int]:
    """Return the vision tower's sizes by letter.

    w        width
    w3       width of queries, keys and values together
    i        width of the MLP
    m        width of the patches that the merger joins
    o        width of the result
    c, t, p  channels, frames, and rows and columns of a patch
    """
    merged_patches = int(vision.get("spatial_merge_size", 2)) ** 2
    return {
        "w": width,
        "w3": 3 * width,
        "i": int(mlp_width),
        "m": width * merged_patches,
        "o": int(out_width),
        "depth": vision["depth"],
        "c": int(vision.get("in_channels", 3)),
        "t": int(vision.get("temporal_patch_size", 2)),
        "p": int(vision.get("patch_size", 14)),
    }


def _tower(depth: int, *, is_gated: bool) -> Iterator[tuple[str, str]]:
    """Yield (name, shape) of the tower's tensors.

    Args:
        depth: number of blocks.
        is_gated: Qwen2.5-VL's RMS norms and gated MLP, in place of Qwen2-VL's layer norms and plain MLP.
    """
    up_projections = ("gate_proj", "up_proj") if is_gated else ("fc1",)
    down_projection = "down_proj" if is_gated else "fc2"
    norm_parameters = ("weight",) if is_gated else ("weight", "bias")
    yield "visual.patch_embed.proj.weight", "w c t p p"
    for number in range(depth):
        block = f"visual.blocks.{number}."
        for norm in ("norm1", "norm2"):
            for parameter in norm_parameters:
                yield f"{block}{norm}.{parameter}", "w"
        yield from _linear(f"{block}attn.qkv", "w3", "w")
        yield from _linear(f"{block}attn.proj", "w", "w")
        for projection in up_projections:
            yield from _linear(f"{block}mlp.{projection}", "i", "w")
        yield from _linear(f"{block}mlp.{down_projection}", "w", "i")
    for parameter in norm_parameters:
        yield f"visual.merger.ln_q.{parameter}", "w"
    yield from _linear("visual.merger.mlp.0", "m", "m")
    yield from _linear("visual.merger.mlp.2", "o", "m")


def _linear(name: str, rows: str, columns: str) -> Iterator[tuple[str, str]]:
    yield f"{name}.weight", f"{rows} {columns}"
    yield f"{name}.bias", rows


def _count(sizes: Mapping[str, int], *, is_gated: bool) -> int:
    """Count the parameters of the tower and its merger."""
    count = 0
    for _, shape in _tower(sizes["depth"], is_gated=is_gated):
        count += math.prod(sizes[letter] for letter in shape.split())
    return count


def _table(spec: ModelSpec) -> tuple[Entry, ...]:
    entries = [entry.within("language_model.") for entry in decoder_table(spec)]
    entries += [copy(name, name, shape) for name, shape in _tower(spec.sizes["depth"], is_gated=True)]
    return tuple(entries)


def _settings(config: Mapping[str, Any], spec: ModelSpec) -> dict[str, Any]:
    text_config = config.get("text_config") or config
    settings = {
        "_target_": _PROVIDER,
        "position_embedding_type": "mrope",
        # The model puts pictures between the text's embeddings, so it scatters them itself afterwards.
        "scatter_embedding_sequence_parallel": False,
        "vision_config": {"_target_": _VISION_CONFIG, **config["vision_config"]},
    }
    if "mrope_section" in spec.rope:
        settings["mrope_section"] = spec.rope["mrope_section"]
    settings |= {key: text_config[key] for key in _ID_KEYS if text_config.get(key) is not None}
    settings |= {key: config[key] for key in _MARKS}
    return settings


QWEN2_VL = FamilySpec(
    "Qwen2VLForConditionalGeneration",
    "qwen2_vl",
    has_qkv_bias=True,
    is_computed=False,
    defaults=_DEFAULTS,
    window=window_of_later_layers,
    table=None,
    sizes=_qwen2_vl_sizes,
    vision_parameters=lambda sizes: _count(sizes, is_gated=False),
    # Megatron-Bridge lacks the family, so NeMo-RL cannot train it with Megatron.
    fixed={"is_bridged": False},
)
QWEN2_5_VL = FamilySpec(
    "Qwen2_5_VLForConditionalGeneration",
    "qwen2_5_vl",
    has_qkv_bias=True,
    is_computed=False,
    defaults={**_DEFAULTS, **_MARKS},
    window=window_of_later_layers,
    table=_table,
    sizes=_qwen2_5_vl_sizes,
    vision_parameters=lambda sizes: _count(sizes, is_gated=True),
    settings=_settings,
)
