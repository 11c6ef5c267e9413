"""A rehearsal's small vision model, its images, and the check that they matter."""

from dataclasses import replace
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from PIL import Image
from transformers import AutoConfig

from nemo_grpo.engine.warm_start_tokenizer import build_tokenizer
from nemo_grpo.families import family_for
from nemo_grpo.plan.presets import shape_of
from nemo_grpo.recipe import load_recipe
from nemo_grpo.rehearsal import comparisons, vision
from nemo_grpo.rehearsal.model import Encoder, small_config
from nemo_grpo.rehearsal.problems import RehearsedTask, problems_of
from nemo_grpo.rehearsal.recorded import Recorded
from nemo_grpo.rehearsal.stages import Failed
from nemo_grpo.rehearsal.torchvision_names import decode_image
from nemo_grpo.tasks.word_problems import WordProblemsConfig

RECIPE = Path(__file__).parents[3] / "recipes" / "gpg" / "gpg-qwen2.5-vl-3b-geoqa-1n8g.yaml"
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


def recorded_rows(tokenizer, problems, numbers) -> list[dict]:
    """Responses to made-up problems, as NeMo-RL records them."""
    rows = []
    for problem in problems:
        ids = tokens_of(tokenizer, *numbers)
        parts = [{"type": "image", "image": problem.metadata["images"][0]}]
        parts.append({"type": "text", "text": f"{problem.question}\nThink."})
        mask = [0] * (len(ids) - 2) + [1, 1]
        rows.append({
            "content": [[parts, "so", ""]], "token_ids": [ids.tolist()], "input_lengths": [len(ids)],
            "token_loss_mask": [mask], "generation_logprobs": [[0.0] * len(ids)],
        })  # fmt: skip
    return rows


class Evidence(Recorded):
    """Recorded responses; a problem's picture is drawn from its number, in place of a processor's."""

    sees_images = True

    def _seen(self, problem):
        return picture(int(Path(problem.metadata["images"][0]).stem))


@pytest.fixture
def evidence(tmp_path, model):
    recipe = load_recipe(RECIPE, ["grpo.num_generations_per_prompt=2"])
    problems = problems_of(recipe, tmp_path / "problems")
    taught = recipe.model_copy(
        update={"nemo_grpo": recipe.nemo_grpo.model_copy(update={"task": problems.task})}
    )
    model.save_pretrained(tmp_path / "model")
    return Evidence(
        SimpleNamespace(
            small=recipe, recipe=recipe, taught=taught, problems=problems,
            model=SimpleNamespace(folder=tmp_path / "model"),
        )
    )  # fmt: skip


def known(evidence):
    return RehearsedTask(evidence.rehearsal.taught, evidence.rehearsal.problems.task).known


def test_a_response_is_recognised_by_its_picture_where_questions_repeat(evidence, tokenizer):
    problems = known(evidence)
    assert len({problem.question for problem in problems}) < len(problems)
    rows = recorded_rows(tokenizer, problems, (7, 8))
    for problem, seen in zip(problems, evidence.images_of(rows), strict=True):
        assert torch.equal(seen["pixel_values"], evidence._seen(problem)["pixel_values"])
    rows[1]["content"][0][0][0]["image"] = "/elsewhere/1.png"
    with pytest.raises(Failed, match="the problem of response 1 is not recognised"):
        evidence.images_of(rows)


def test_images_that_make_no_difference_are_said_to_prove_nothing(evidence, tokenizer, model, tmp_path):
    problems = [problem for problem in known(evidence)[:3] for _ in range(2)]
    rows = recorded_rows(tokenizer, problems, (7, 8))
    sequences = comparisons.sequences_of(evidence, rows)
    own, _ = comparisons.all_logprobs(model, sequences, 1.0)
    for row, values in zip(rows, own, strict=True):
        row["generation_logprobs"] = [[0.0, *values.tolist()]]
    folder = tmp_path / "model"
    assert "0.0000 from the sampler's" in comparisons.compare_with_model(
        evidence, folder, rows, "generation_logprobs", "sampler"
    )
    shown = comparisons.error_of_other_images(evidence, rows, "generation_logprobs")
    assert float(shown.split()[0]) > comparisons.TOLERANCE
    swapped = replace(sequences, seen=[*sequences.seen[2:], *sequences.seen[:2]])
    wrong, _ = comparisons.all_logprobs(model, swapped, 1.0)
    assert not torch.allclose(wrong, own, atol=comparisons.TOLERANCE)
    blind = vision.model_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder)
    torch.nn.init.zeros_(blind.model.visual.merger.mlp[2].weight)
    blind.save_pretrained(folder)
    for row, values in zip(rows, comparisons.all_logprobs(blind, sequences, 1.0)[0], strict=True):
        row["generation_logprobs"] = [[0.0, *values.tolist()]]
    with pytest.raises(Failed, match="so that confused images are not noticed"):
        comparisons.error_of_other_images(evidence, rows, "generation_logprobs")


def test_an_encoder_without_a_processor_gives_text_alone(tokenizer):
    problem = WordProblemsConfig().build().train_problem(0, 0)
    encoder = Encoder(tokenizer, load_recipe(RECIPE).nemo_grpo.prompt)
    assert encoder.inputs(None, None, [problem]) == {}
