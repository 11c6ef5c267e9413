"""A rehearsal's small vision model, and its images."""

from io import BytesIO
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image

from nemo_grpo.engine.warm_start_tokenizer import build_tokenizer
from nemo_grpo.models import family_for
from nemo_grpo.plan.inputs import shape_of
from nemo_grpo.recipe import load_recipe
from nemo_grpo.rehearsal import vision
from nemo_grpo.rehearsal.model import small_config
from nemo_grpo.rehearsal.torchvision_names import decode_image
from nemo_grpo.tasks.word_problems import WordProblemsConfig

RECIPE = Path(__file__).parents[3] / "recipes" / "gpg" / "gpg-qwen2.5-vl-3b-geoqa-1n8g.yaml"
PATCH, GRID = 3 * 2 * 14 * 14, (1, 4, 4)
"""Numbers of a patch, and patches of a picture of 56 x 56 pixels."""
IMAGE_TOKENS = 4
"""Of such a picture: 2 x 2 patches are merged."""


def made_tokenizer():
    made = build_tokenizer(WordProblemsConfig().build(), 400, 0)
    made.add_tokens(list(vision.MARKS.values()), special_tokens=True)
    return made


def made_model(tokenizer):
    """Weights so large that a picture decides about the text."""
    config, _ = small_config(load_recipe(RECIPE), -(-len(tokenizer) // 8) * 8, tokenizer)
    torch.manual_seed(0)
    made = vision.model_class(config).from_config(config, dtype=torch.float32).eval()
    for parameter in made.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    return made


@pytest.fixture(scope="module")
def tokenizer():
    return made_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return made_model(tokenizer)


def picture(seed: int) -> dict[str, torch.Tensor]:
    pixels = torch.randn(GRID[1] * GRID[2], PATCH, generator=torch.Generator().manual_seed(seed))
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([GRID])}


def tokens_of(tokenizer, *numbers: int) -> torch.Tensor:
    marked = [tokenizer.convert_tokens_to_ids(vision.MARKS["image_token_id"])] * IMAGE_TOKENS
    return torch.tensor([5, *marked, *numbers])


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
    ids = tokens_of(tokenizer, 7, 8)[None]
    image_token = model.config.image_token_id
    logits = [
        model(ids, **vision.inputs_of(ids, image_token, [picture(seed)])).logits[0, -1] for seed in (0, 0, 1)
    ]
    assert torch.equal(logits[0], logits[1])
    assert (logits[0] - logits[2]).abs().max() > 0.1
    rows = vision.inputs_of(ids.repeat(2, 1), image_token, [picture(0), picture(1)])
    both = model(ids.repeat(2, 1), **rows).logits[:, -1]
    torch.testing.assert_close(both, torch.stack([logits[0], logits[2]]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("of_bytes", [False, True])
def test_a_picture_is_decoded_as_pillow_does(tmp_path, of_bytes):
    pixels = numpy.arange(5 * 7 * 3, dtype=numpy.uint8).reshape(5, 7, 3)
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    (tmp_path / "a.png").write_bytes(file.getvalue())
    source = (
        torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
        if of_bytes
        else str(tmp_path / "a.png")
    )
    found = decode_image(source, "RGB")
    assert found.shape == (3, 5, 7)
    assert torch.equal(found.permute(1, 2, 0), torch.from_numpy(pixels))
