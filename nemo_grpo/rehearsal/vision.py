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
DEPTH = 2
"""Blocks of the vision tower; the last one sees the whole image, the others windows, as in the family."""
WIDTH = 64
NUM_HEADS = 2
FFN = 128
MIN_PIXELS = 56 * 56
"""Least pixels of a resized image: 4 tokens of 28 x 28."""
MAX_PIXELS = 8 * 28 * 28
"""Most pixels of a resized image: 8 tokens."""


def has_vision(config: Any) -> bool:
    """Return True for the configuration of a model with a vision tower."""
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
    return {
        "text_config": decoder,
        "vision_config": tower,
        "tie_word_embeddings": shape.tied_embeddings,
        **marks,
    }


def processor_of(tokenizer: Any) -> Any:
    """Make Qwen2.5-VL's processor around a tokenizer, which gets the family's marks and template."""
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    tokenizer.add_tokens(list(MARKS.values()), special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    images = Qwen2VLImageProcessor(min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS)
    return Qwen2_5_VLProcessor(images, tokenizer, Qwen2VLVideoProcessor(), chat_template=TEMPLATE)


def encoded(processor: Any, prompt: Prompt, problem: Problem) -> tuple[list[int], dict[str, Any]]:
    """Encode a prompt as NeMo-RL's function does: (its tokens, the model's inputs for its images)."""
    encoding = processor.apply_chat_template(
        [image_message(prompt, problem)],
        tokenize=True,
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    images = {name: encoding[name] for name in ("pixel_values", "image_grid_thw")}
    return encoding["input_ids"][0].tolist(), images


def inputs_of(ids: Any, image_token: int, images_by_row: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the inputs of a vision model beside the tokens.

    Args:
        ids: [B, S].
        image_token: id of the image placeholder, from the model's configuration.
        images_by_row: inputs for the images of each row, as `encoded` returns them.
    """
    import torch

    # Concatenated and not stacked, because the model takes the patches of all images as one list.
    inputs = {name: torch.cat([images[name] for images in images_by_row]) for name in images_by_row[0]}
    inputs["mm_token_type_ids"] = (ids == image_token).int()
    return inputs
