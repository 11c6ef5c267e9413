"""A rehearsal's small vision model, and its images."""

import numpy
import pytest
import torch
from PIL import Image

from nemo_grpo.engine.task_tokenizer import build_tokenizer
from nemo_grpo.models import family_for
from nemo_grpo.plan.inputs import shape_of
from nemo_grpo.recipe import load_recipe
from nemo_grpo.rehearsal import vision
from nemo_grpo.rehearsal.small_config import small_config
from nemo_grpo.rehearsal.torchvision_names import decode_image
from nemo_grpo.tasks.word_problems import WordProblemsConfig

RECIPE = "gpg/gpg-qwen2.5-vl-3b-geoqa-1n8g"
PATCH, GRID = 3 * 2 * 14 * 14, (1, 4, 4)
"""Numbers of a patch, and patches of a picture of 56 x 56 pixels."""
IMAGE_TOKENS = 4
"""Of such a picture: 2 x 2 patches are merged."""


@pytest.fixture(scope="module")
def tokenizer():
    made = build_tokenizer(WordProblemsConfig().build(), 400, 0)
    made.add_tokens(list(vision.MARKS.values()), special_tokens=True)
    return made


@pytest.fixture(scope="module")
def model(tokenizer):
    """Weights so large that a picture decides about the text."""
    config, _ = small_config(load_recipe(RECIPE), -(-len(tokenizer) // 8) * 8, tokenizer)
    torch.manual_seed(0)
    made = vision.model_class(config).from_config(config, dtype=torch.float32).eval()
    for parameter in made.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    return made


def picture(seed):
    pixels = torch.randn(GRID[1] * GRID[2], PATCH, generator=torch.Generator().manual_seed(seed))
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([GRID])}


def test_the_small_model_is_the_recipes_family_in_small(model, tokenizer):
    shape, text = shape_of(load_recipe(RECIPE)), model.config.text_config
    assert model.config.model_type == shape.model_type
    family_for(model.config.to_dict())  # the converters know it
    assert model.config.tie_word_embeddings == shape.tied_embeddings
    assert text.hidden_size // text.num_attention_heads == vision.HEAD_DIM == shape.head_dim
    assert sum(text.rope_parameters["mrope_section"]) == vision.HEAD_DIM // 2
    assert text.num_key_value_heads < text.num_attention_heads
    assert model.config.image_token_id == tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert model.num_parameters() < 20e6


def test_what_the_model_sees_changes_its_logits(model, tokenizer):
    image_token = model.config.image_token_id
    ids = torch.tensor([[5, *[image_token] * IMAGE_TOKENS, 7, 8]])
    inputs = (vision.inputs_of(ids, image_token, [picture(seed)]) for seed in (0, 0, 1))
    logits = [model(ids, **given).logits[0, -1] for given in inputs]
    assert torch.equal(logits[0], logits[1])
    assert (logits[0] - logits[2]).abs().max() > 0.1
    rows = vision.inputs_of(ids.repeat(2, 1), image_token, [picture(0), picture(1)])
    both = model(ids.repeat(2, 1), **rows).logits[:, -1]
    torch.testing.assert_close(both, torch.stack([logits[0], logits[2]]), rtol=1e-4, atol=1e-4)


def test_a_picture_is_decoded_as_pillow_does(tmp_path):
    pixels = numpy.arange(5 * 7 * 3, dtype=numpy.uint8).reshape(5, 7, 3)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    of_bytes = torch.frombuffer(bytearray((tmp_path / "a.png").read_bytes()), dtype=torch.uint8)
    for source in (of_bytes, str(tmp_path / "a.png")):
        assert torch.equal(decode_image(source, "RGB").permute(1, 2, 0), torch.from_numpy(pixels))
