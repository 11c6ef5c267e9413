"""Configuration of a rehearsal's model: the recipe's family with everything that shapes the computation."""

import json
from pathlib import Path
from typing import Any

from nemo_grpo.models import COMPUTED, ModelSpec
from nemo_grpo.plan.inputs import PRESETS, shape_of
from nemo_grpo.recipe import Recipe
from nemo_grpo.recipe.host import has_images
from nemo_grpo.rehearsal import vision
from nemo_grpo.support.errors import UserError
from nemo_grpo.support.model_folder import with_config_overrides

HEAD_DIM = 32
"""The smallest head size of vLLM's attention on a CPU."""
NUM_HEADS = 4
NUM_LAYERS = 2
FFN = 256
NUM_EXPERTS = 4
NOT_SHRUNK = ("model_type", "layer_types", "max_window_layers", "mlp_only_layers")
"""Keys of a config.json that depend on its own number of layers, or are set separately."""
ROPE_KEYS = ("rope_parameters", "rope_scaling")
"""Keys of a config.json's rotary embedding."""
ROPE_FACTORS = ("short_factor", "long_factor")
"""Lists in it with one number per pair of a head's elements."""
MODEL_TYPES = (*(family.model_type for family in COMPUTED), "qwen3_moe", "qwen2_5_vl")
"""Families whose layers a rehearsal can compute: the embedded engine's, megatron-core's own experts, and one
with transformers' own vision tower."""
DENSE = "Qwen/Qwen2.5-1.5B"
"""Dense model that is shrunk if the recipe's is of another family."""
EXPERTS = "Qwen/Qwen3-30B-A3B"
"""Model with experts that is shrunk in the same case."""
IMAGES = "Qwen/Qwen2.5-VL-3B-Instruct"
"""Model with images that is shrunk in the same case."""


def rehearsed_shape(recipe: Recipe) -> tuple[ModelSpec, str]:
    """Return the model whose architecture is rehearsed, and the reason if it is not the recipe's, else ""."""
    try:
        shape = shape_of(recipe)
    except UserError:
        reason = "which is not known here"
        has_experts = recipe.policy.layout.expert > 1
    else:
        if shape.model_type in MODEL_TYPES:
            return shape, ""
        reason = f"because the layers of {shape.model_type} are not computed on a CPU"
        has_experts = shape.num_experts > 0
    if has_images(recipe):
        name = IMAGES
    else:
        name = EXPERTS if has_experts else DENSE
    return PRESETS[name], f"in place of {recipe.policy.model_name}, {reason}"


def small_config(recipe: Recipe, vocab_size: int, tokenizer: Any) -> tuple[Any, str]:
    """Make a small transformers configuration of the recipe's family; also returns a clause on its origin.

    Everything that shapes the computation stays (biases, norms on q and k, tied embeddings, grouped heads,
    rotary scaling, experts); sizes shrink. Heads and layers stay divisible by 2, for TP and PP.
    """
    from transformers import AutoConfig

    shape, stand_in_reason = rehearsed_shape(recipe)
    full_config = {} if stand_in_reason else _config_file(recipe)
    origin = f"{shape.model_type} of {shape.name}, shrunk, from "
    origin += "its config.json" if full_config else "the planner's table"
    if stand_in_reason:
        origin += f", {stand_in_reason}"
    sizes = _small_sizes(shape, vocab_size, tokenizer)
    if shape.num_vision_parameters:
        settings = vision.config_of(shape, sizes, tokenizer)
        return AutoConfig.for_model(shape.model_type, **settings), origin

    if not full_config:
        full_config = {"max_position_embeddings": shape.max_position_embeddings}
        if shape.rope["rope_type"] != "default":
            full_config["rope_parameters"] = dict(shape.rope)
    settings = {name: value for name, value in full_config.items() if name not in NOT_SHRUNK}
    for key in ROPE_KEYS:
        if settings.get(key):
            settings[key] = _rope_of_small_heads(settings[key])
    settings |= sizes
    # Every sequence of a rehearsal is shorter than a model's window; Mistral's default would be one of 4096.
    settings |= {"use_sliding_window": False, "sliding_window": None}
    return AutoConfig.for_model(shape.model_type, **settings), origin


def _small_sizes(shape: ModelSpec, vocab_size: int, tokenizer: Any) -> dict[str, Any]:
    """Return the small sizes of a transformers configuration, and the ids of the tokenizer's tokens."""
    has_grouped_heads = shape.num_key_value_heads < shape.num_attention_heads
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": NUM_HEADS * HEAD_DIM,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_HEADS // 2 if has_grouped_heads else NUM_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": FFN,
        "tie_word_embeddings": shape.tied_embeddings,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if shape.num_experts:
        sizes |= {"num_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": FFN // 2}
    return sizes


def _rope_of_small_heads(rope: dict[str, Any]) -> dict[str, Any]:
    """Shorten the lists of a rotary embedding to the small heads."""
    shortened = {name: rope[name][: HEAD_DIM // 2] for name in ROPE_FACTORS if rope.get(name)}
    return {**rope, **shortened}


def _config_file(recipe: Recipe) -> dict[str, Any]:
    """Read the model's config.json from its folder or the cache, without a network; {} if it is not there."""
    from huggingface_hub import try_to_load_from_cache

    name = recipe.policy.model_name or ""
    path = Path(name) / "config.json"
    if not Path(name).is_dir():
        # A result that is not a path means that the hub has no such file, as an earlier download found out.
        cached = try_to_load_from_cache(name, "config.json")
        if isinstance(cached, str):
            path = Path(cached)
    if not path.is_file():
        return {}
    return with_config_overrides(json.loads(path.read_text()), recipe.policy.hf_config_overrides)
