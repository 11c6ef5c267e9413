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
_IDS = ("bos_token_id", "eos_token_id")
_MARKS = {
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "image_token_id": 151655,
    "video_token_id": 151656,
}
"""Tokens around and in place of pictures -> transformers' defaults."""


def _qwen2_5_vl(config: Mapping[str, Any]) -> dict[str, int]:
    vision = config["vision_config"]
    return _sizes(vision, vision["hidden_size"], vision["intermediate_size"], vision["out_hidden_size"])


def _qwen2_vl(config: Mapping[str, Any]) -> dict[str, int]:
    vision = config["vision_config"]
    width, text = vision["embed_dim"], config.get("text_config") or config
    return _sizes(vision, width, width * vision.get("mlp_ratio", 4), text["hidden_size"])


def _sizes(vision: Mapping[str, Any], width: int, ffn: int, out: int) -> dict[str, int]:
    """w width, w3 its queries, keys and values, i MLP, m merged patches, o result, c t p a patch's axes."""
    merged = width * int(vision.get("spatial_merge_size", 2)) ** 2
    patch, frames = int(vision.get("patch_size", 14)), int(vision.get("temporal_patch_size", 2))
    found = {"w": width, "w3": 3 * width, "i": int(ffn), "m": merged, "o": int(out), "depth": vision["depth"]}
    return found | {"c": int(vision.get("in_channels", 3)), "t": frames, "p": patch}


def _tower(depth: int, *, is_gated: bool) -> Iterator[tuple[str, str]]:
    """(name, shape) of the tower; Qwen2-VL has layer norms and a plain MLP, 2.5 RMS norms and a gate."""
    up = ("gate_proj", "up_proj") if is_gated else ("fc1",)
    down = "down_proj" if is_gated else "fc2"
    norm = ("weight",) if is_gated else ("weight", "bias")
    yield "visual.patch_embed.proj.weight", "w c t p p"
    for number in range(depth):
        block = f"visual.blocks.{number}."
        yield from ((f"{block}{name}.{kind}", "w") for name in ("norm1", "norm2") for kind in norm)
        yield from _linear(f"{block}attn.qkv", "w3", "w")
        yield from _linear(f"{block}attn.proj", "w", "w")
        for name in up:
            yield from _linear(f"{block}mlp.{name}", "i", "w")
        yield from _linear(f"{block}mlp.{down}", "w", "i")
    yield from ((f"visual.merger.ln_q.{kind}", "w") for kind in norm)
    yield from _linear("visual.merger.mlp.0", "m", "m")
    yield from _linear("visual.merger.mlp.2", "o", "m")


def _linear(name: str, rows: str, columns: str) -> Iterator[tuple[str, str]]:
    yield f"{name}.weight", f"{rows} {columns}"
    yield f"{name}.bias", rows


def _count(sizes: Mapping[str, int], *, is_gated: bool) -> int:
    tower = _tower(sizes["depth"], is_gated=is_gated)
    return sum(math.prod(sizes[letter] for letter in shape.split()) for _, shape in tower)


def _table(spec: ModelSpec) -> tuple[Entry, ...]:
    language = (entry.within("language_model.") for entry in decoder_table(spec))
    tower = _tower(spec.sizes["depth"], is_gated=True)
    return (*language, *(copy(name, name, shape) for name, shape in tower))


def _settings(config: Mapping[str, Any], spec: ModelSpec) -> dict[str, Any]:
    text = config.get("text_config") or config
    sections = {key: spec.rope[key] for key in ("mrope_section",) if key in spec.rope}
    ids = {key: text[key] for key in _IDS if text.get(key) is not None}
    marks = {key: config[key] for key in _MARKS}
    return {
        "_target_": _PROVIDER,
        "position_embedding_type": "mrope",
        "scatter_embedding_sequence_parallel": False,
        "vision_config": {"_target_": _VISION_CONFIG, **config["vision_config"]},
        **sections,
        **ids,
        **marks,
    }


QWEN2_VL = FamilySpec(
    "Qwen2VLForConditionalGeneration",
    "qwen2_vl",
    has_qkv_bias=True,
    is_computed=False,
    defaults=_DEFAULTS,
    window=window_of_later_layers,
    table=None,
    sizes=_qwen2_vl,
    vision_parameters=lambda sizes: _count(sizes, is_gated=False),
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
    sizes=_qwen2_5_vl,
    vision_parameters=lambda sizes: _count(sizes, is_gated=True),
    settings=_settings,
)
