"""gIoU and cIoU by hand, and a real Segment Anything model of random weights."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import SamConfig, SamImageProcessorPil, SamModel, SamProcessor
from typer.testing import CliRunner

from benchmarks.studies.masks import app, polygon_mask, score_masks
from nemo_grpo.support.errors import UserError
from nemo_grpo.tasks import Problem


def rectangle(left, top, right, bottom):
    """Pixels left to right and top to bottom, both ends included."""
    return [[left, top], [right, top], [right, bottom], [left, bottom]]


def said(*box):
    return f"<answer>({box[0]},{box[1]}),({box[2]},{box[3]})</answer>"


def filled(image, box):
    """The box itself as its mask."""
    left, top, right, bottom = map(int, box)
    mask = np.zeros((image.height, image.width), dtype=bool)
    mask[top:bottom, left:right] = True
    return mask


@pytest.fixture
def problems(tmp_path):
    Image.new("RGB", (20, 10)).save(tmp_path / "a.png")
    metadata = {"images": [str(tmp_path / "a.png")], "ignore": []}
    target = {"target": [rectangle(0, 0, 3, 3)]}  # 16 pixels
    two = {"target": [rectangle(0, 0, 1, 3), rectangle(2, 0, 3, 3)], "ignore": [rectangle(0, 0, 19, 0)]}
    return [
        Problem("half", "q", "(0,0),(4,4)", metadata | target),
        Problem("none", "q", "(0,0),(4,4)", metadata | target),
        Problem("ignore", "q", "(0,0),(4,4)", metadata | two),
    ]


def test_polygons_are_filled_with_their_outline():
    mask = polygon_mask([rectangle(0, 0, 3, 3)], (20, 10))
    assert (mask.shape, int(mask.sum()), bool(mask[3, 3]), bool(mask[4, 3])) == ((10, 20), 16, True, False)


def test_giou_and_ciou_by_hand(problems):
    responses = {"half": said(0, 0, 2, 4), "none": "I see nothing", "ignore": said(-5, 0, 8, 99)}
    scores = score_masks(problems, responses, filled)
    # 8 of 16; 0 of 16; rows 1 to 9 count: the target has 12 pixels there, the box, cut to the picture, 72
    assert scores.ious == [8 / 16, 0.0, 12 / 72]
    assert scores.giou == pytest.approx((1 / 2 + 1 / 6) / 3)
    assert scores.ciou == pytest.approx((8 + 12) / (16 + 16 + 72))
    assert scores.num_boxes == 2


def test_what_cannot_be_compared_is_refused(problems):
    with pytest.raises(UserError, match="no problem of --data has a response"):
        score_masks(problems, {"other": ""}, filled)
    bare = Problem("half", "q", "1", {"images": problems[0].metadata["images"]})
    with pytest.raises(UserError, match=r"'half' has no metadata\.target"):
        score_masks([bare], {"half": ""}, filled)


@pytest.fixture(scope="module")
def sam(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sam")
    torch.manual_seed(0)
    config = SamConfig(
        vision_config=dict(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=64, patch_size=16,
            output_channels=16, mlp_dim=16, num_pos_feats=8, global_attn_indexes=[0],
        ),
        prompt_encoder_config=dict(
            hidden_size=16, image_size=64, patch_size=16, image_embedding_size=4, mask_input_channels=4
        ),
        mask_decoder_config=dict(
            hidden_size=16, num_attention_heads=2, mlp_dim=16, iou_head_hidden_dim=16, num_hidden_layers=1
        ),
    )  # fmt: skip
    SamModel(config).save_pretrained(folder)
    images = SamImageProcessorPil(
        size={"longest_edge": 64}, pad_size={"height": 64, "width": 64},
        mask_size={"longest_edge": 16}, mask_pad_size={"height": 16, "width": 16},
    )  # fmt: skip
    SamProcessor(images).save_pretrained(folder)
    return folder


def test_the_command_reads_what_eval_wrote(sam, tmp_path):
    Image.new("RGB", (20, 10), "red").save(tmp_path / "a.png")
    metadata = {"images": ["a.png"], "target": [rectangle(0, 0, 3, 3)], "ignore": []}
    line = {"id": "x", "question": "q", "answer": "(0,0),(4,4)", "metadata": metadata}
    (tmp_path / "lisa.jsonl").write_text(json.dumps(line) + "\n")
    (tmp_path / "samples-lisa.jsonl").write_text(
        json.dumps({"id": "x", "greedy_completion": said(0, 0, 9, 9)})
    )
    files = ["--samples", str(tmp_path / "samples-lisa.jsonl"), "--data", str(tmp_path / "lisa.jsonl")]
    done = CliRunner().invoke(app, [*files, "--sam", str(sam)], catch_exceptions=False)
    result = json.loads((tmp_path / "masks-lisa.json").read_text())
    assert (len(result["ious"]), result["num_boxes"]) == (1, 1)
    assert f"gIoU {100 * result['giou']:.1f}" in done.output
    wrong = CliRunner().invoke(app, [*files, "--sam", str(tmp_path)])
    assert "cannot be loaded" in str(wrong.exception)
