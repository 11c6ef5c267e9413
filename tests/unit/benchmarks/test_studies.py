"""Studies of a trained model by hand: gIoU and cIoU of boxes, positions and means of the perturbations."""

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.studies.masks import polygon_mask, score_masks
from benchmarks.studies.perturbation import choose_positions
from benchmarks.studies.pivot_results import PivotSettings, PivotStudy, Point, Solved, sign_flip_p
from nemo_grpo.support.errors import UserError
from nemo_grpo.tasks import Problem


def rectangle(left, top, right, bottom):
    """Pixels left to right and top to bottom, both ends included."""
    return [[left, top], [right, top], [right, bottom], [left, bottom]]


def filled(image, box):
    """The box itself as its mask."""
    left, top, right, bottom = map(int, box)
    mask = np.zeros((image.height, image.width), dtype=bool)
    mask[top:bottom, left:right] = True
    return mask


def test_giou_and_ciou_by_hand(tmp_path):
    Image.new("RGB", (20, 10)).save(tmp_path / "a.png")
    one = {"images": [str(tmp_path / "a.png")], "ignore": [], "target": [rectangle(0, 0, 3, 3)]}  # 16 pixels
    two = one | {"target": [rectangle(0, 0, 1, 3), rectangle(2, 0, 3, 3)], "ignore": [rectangle(0, 0, 19, 0)]}
    metadata = {"half": one, "none": one, "ignore": two}
    problems = [Problem(name, "q", "(0,0),(4,4)", given) for name, given in metadata.items()]
    said = {"half": "(0,0),(2,4)", "none": "I see nothing", "ignore": "(-5,0),(8,99)"}
    scores = score_masks(problems, {name: f"<answer>{box}</answer>" for name, box in said.items()}, filled)
    # 8 of 16; 0 of 16; rows 1 to 9 count: the target has 12 pixels there, the box, cut to the picture, 72
    assert scores.ious == [8 / 16, 0.0, 12 / 72]
    assert scores.giou == pytest.approx((1 / 2 + 1 / 6) / 3)
    assert scores.ciou == pytest.approx((8 + 12) / (16 + 16 + 72))
    assert scores.num_boxes == 2
    mask = polygon_mask(one["target"], (20, 10))
    assert (mask.shape, int(mask.sum()), bool(mask[3, 3]), bool(mask[4, 3])) == ((10, 20), 16, True, False)
    with pytest.raises(UserError, match="no problem of --data has a response"):
        score_masks(problems, {"other": ""}, filled)


def item(entropies, response=None):
    response = response or list(range(len(entropies)))
    return Solved(Problem("p", "ab", "c"), [0, 1], response, torch.tensor(entropies))


def test_pivots_are_the_most_and_calm_ones_the_least_undecided():
    chosen = choose_positions(item([0.1, 0.9, 0.3, 0.0, 0.5, 7.0]), PivotSettings(share=0.4))
    assert chosen["pivot"] == [1, 4]  # two of five candidates; the last token, 7.0, has nothing after it
    assert set(chosen["calm"]) == {0, 3}
    assert len(set(chosen["random"])) == 2
    assert max(chosen["random"]) <= 4
    bounded = PivotSettings(share=0.05, max_positions=4)
    assert [bounded.num_positions(candidates) for candidates in (1, 10, 30, 1000)] == [1, 1, 2, 4]


def test_summary_averages_within_responses_first():
    def point(problem, kind, kept, replaced, position=0):
        return Point(problem, kind, position, 0.5, "a", "b", kept, replaced)

    points = [point("p", "pivot", 1.0, 0.0), point("p", "pivot", 1.0, 0.5, 1), point("q", "pivot", 0.5, 0.5)]
    points += [point(name, kind, 1.0, 1.0) for name in "pq" for kind in ("random", "calm")]
    study = PivotStudy(PivotSettings(), 5, [], points)
    row = study.summary()["pivot"]
    assert row["kept"] == 0.75  # p: 1, q: 0.5
    assert row["replaced"] == pytest.approx(0.375)  # p: 0.25, q: 0.5
    assert row["drop"] == pytest.approx(0.375)  # p: 0.75, q: 0
    contrast = study.contrasts()["pivot - random"]
    assert contrast["difference"] == pytest.approx(0.375)
    assert contrast["stderr"] == pytest.approx(0.375)  # deviation 0.75 / sqrt 2, over sqrt 2 responses
    # Four equal differences: |mean| is reached by all plus or all minus, 2 of 16 patterns.
    assert sign_flip_p([0.5] * 4, seed=0) == pytest.approx(2 / 16, abs=0.015)
