"""A rehearsal's vision model: small configuration, processor, and encoding of prompts with images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nemo_grpo.tasks import Problem, Prompt
from nemo_grpo.tasks.prompts import image_message

if TYPE_CHECKING:
    from nemo_grpo.models.spec import ModelSpec

MARKS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
"""Key of Qwen2.5-VL's configuration -> its token."""
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEAD_DIM = 128
"""Size of a head, which cannot shrink: see `MROPE_SECTION`."""
MROPE_SECTION = (16, 24, 24)
"""Rotary sections of the full model, which need heads of 128. Megatron-Bridge 0.6 takes these whatever the
configuration says.

Upstream: none known.
Needed while: tests/nemo_rl/test_workarounds.py::test_bridge_ignores_the_rotary_sections_of_a_vision_model"""
DEPTH, WIDTH, NUM_HEADS, FFN = 2, 64, 2, 128
"""Sizes of the vision tower; its last block sees the whole image, the others windows, as in the family."""
MIN_PIXELS, MAX_PIXELS = 56 * 56, 8 * 28 * 28
"""An image becomes 4 to 8 tokens, whatever its size."""


def has_vision(config: Any) -> bool:
    """True for the configuration of a model with a vision tower."""
    return getattr(config, "vision_config", None) is not None


def model_class(config: Any) -> Any:
    """Choose the class of transformers' that makes or loads the model."""
    import transformers

    name = "AutoModelForImageTextToText" if has_vision(config) else "AutoModelForCausalLM"
    return getattr(transformers, name)


def config_of(shape: ModelSpec, text: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Make the settings of Qwen2.5-VL's configuration, given those of its decoder."""
    marks = {key: tokenizer.convert_tokens_to_ids(token) for key, token in MARKS.items()}
    hidden = text["num_attention_heads"] * HEAD_DIM
    rope = {"rope_type": "default", "rope_theta": shape.rope["rope_theta"]}
    decoder = {name: value for name, value in text.items() if name not in ("head_dim", "tie_word_embeddings")}
    decoder |= {"hidden_size": hidden, "rope_parameters": rope | {"mrope_section": list(MROPE_SECTION)}}
    tower = {
        "depth": DEPTH,
        "hidden_size": WIDTH,
        "num_heads": NUM_HEADS,
        "intermediate_size": FFN,
        "out_hidden_size": hidden,
        "fullatt_block_indexes": [DEPTH - 1],
    }
    tied = {"tie_word_embeddings": shape.tied_embeddings}
    return {"text_config": decoder, "vision_config": tower, **tied, **marks}


def processor_of(tokenizer: Any) -> Any:
    """Make Qwen2.5-VL's processor around a tokenizer, which gets the family's marks and template."""
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    tokenizer.add_tokens(list(MARKS.values()), special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    images = Qwen2VLImageProcessor(min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS)
    return Qwen2_5_VLProcessor(images, tokenizer, Qwen2VLVideoProcessor(), chat_template=TEMPLATE)


def encoded(processor: Any, prompt: Prompt, problem: Problem) -> tuple[list[int], dict[str, Any]]:
    """Encode a prompt as NeMo-RL's function does: (its tokens, the model's inputs for its images)."""
    options = {"tokenize": True, "add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    found = processor.apply_chat_template([image_message(prompt, problem)], **options)
    return found["input_ids"][0].tolist(), {name: found[name] for name in ("pixel_values", "image_grid_thw")}


def inputs_of(ids: Any, image_token: int, seen: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the inputs of a vision model beside the tokens.

    Args: ids: [B, S].  image_token: of the model's configuration.  seen: per row, see `encoded`.
    """
    import torch

    together = {name: torch.cat([one[name] for one in seen]) for name in seen[0]}
    return {**together, "mm_token_type_ids": (ids == image_token).int()}
