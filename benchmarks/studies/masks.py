"""Grounding by masks: SAM makes a mask of each predicted box, compared with the target's polygons.

gIoU is the mean over images of the masks' IoU, cIoU the sum of intersections over the sum of unions (LISA,
2308.00692, section 4.1; Visual-RFT's box2mask.py and mask_iou.py).

    python -m benchmarks.studies.masks --samples runs/eval-x/samples-lisa-test.jsonl \
        --data data/lisa-test.jsonl --sam sam-vit-huge

Deviation: the target is every polygon of that label without the pixels to be ignored, as in LISA; Visual-RFT
takes the first polygon of a file, whatever its label.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from nemo_grpo.cli import main
from nemo_grpo.sampling.images import read_image
from nemo_grpo.support.errors import UserError, first_line
from nemo_grpo.tasks import Problem
from nemo_grpo.tasks.jsonl import read_problems
from nemo_grpo.tasks.response import extract_answer
from nemo_grpo.tasks.vision import Box, parse_box

app = typer.Typer(add_completion=False)

Polygons = Sequence[Sequence[Sequence[float]]]
"""Polygons, each a list of [x, y] in pixels."""
MaskOfBox = Callable[[Any, Box], "np.ndarray"]
"""(RGB picture, box in its pixels) -> [H, W] bool."""


@dataclass(frozen=True)
class MaskScores:
    """Scores of one response to each image.

    Attributes:
        giou: mean IoU of the masks.
        ciou: sum of all intersections over the sum of all unions.
        num_boxes: responses with a box that is not empty; all others have IoU 0.
        ious: IoU of each image.
    """

    giou: float
    ciou: float
    num_boxes: int
    ious: list[float]


class SamMasks:
    """A Segment Anything model from a Hugging Face folder, such as facebook/sam-vit-huge.

    Args:
        folder: folder with configuration, weights and processor.
        device: torch's device.
    """

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        from transformers import SamModel, SamProcessor

        try:
            self._model = SamModel.from_pretrained(folder, local_files_only=True).eval().to(device)
            self._processor = SamProcessor.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise UserError(
                f"--sam {folder} cannot be loaded ({first_line(error)}); give the folder of a SamModel, such "
                "as a download of facebook/sam-vit-huge"
            ) from error
        self._device = device

    @torch.no_grad()
    def __call__(self, image: Any, box: Box) -> np.ndarray:
        """See `MaskOfBox`."""
        inputs = self._processor(image, input_boxes=[[list(box)]], return_tensors="pt").to(self._device)
        masks = self._model(**inputs, multimask_output=False).pred_masks
        (mask,) = self._processor.image_processor.post_process_masks(
            masks.cpu(), inputs["original_sizes"].cpu(), inputs["reshaped_input_sizes"].cpu()
        )
        return mask[0, 0].numpy().astype(bool)


def polygon_mask(polygons: Polygons, size: tuple[int, int]) -> np.ndarray:
    """Return [H, W] bool, True for pixels in any of the polygons or on their outlines.

    Args:
        polygons: may overlap.
        size: (width, height).
    """
    from PIL import Image, ImageDraw

    picture = Image.new("1", size)
    for polygon in polygons:
        ImageDraw.Draw(picture).polygon([(x, y) for x, y in polygon], outline=1, fill=1)
    return np.array(picture, dtype=bool)


def score_masks(
    problems: Iterable[Problem], responses: Mapping[str, str], mask_of_box: MaskOfBox
) -> MaskScores:
    """Compute gIoU and cIoU of one response to each problem.

    Args:
        problems: problems with ``metadata.images``, ``target`` and ``ignore``.
        responses: id of a problem -> its response; a problem without one is left out.
        mask_of_box: makes the mask of a box.
    """
    areas: list[tuple[int, int]] = []
    num_boxes = 0
    for problem in problems:
        if problem.id not in responses:
            continue
        if not problem.metadata.get("target"):
            raise UserError(f"problem {problem.id!r} has no metadata.target; prepare the data set again")
        image = read_image(problem.metadata["images"][0])
        target = polygon_mask(problem.metadata["target"], image.size)
        counted = ~polygon_mask(problem.metadata.get("ignore", ()), image.size)
        box = _within(parse_box(extract_answer(responses[problem.id]) or ""), image.size)
        mask = np.zeros_like(target)
        if box is not None:
            num_boxes += 1
            mask = mask_of_box(image, box)
        shared = int((target & mask & counted).sum())
        union = int(((target | mask) & counted).sum())
        areas.append((shared, union))
    if not areas:
        raise UserError("no problem of --data has a response in --samples; give the file that was evaluated")
    ious = [_ratio(shared, union) for shared, union in areas]
    total_shared = sum(shared for shared, _ in areas)
    total_union = sum(union for _, union in areas)
    giou = math.fsum(ious) / len(ious)
    return MaskScores(giou, _ratio(total_shared, total_union), num_boxes, ious)


def _ratio(shared: int, union: int) -> float:
    """Divide two areas; 0 if the union is empty."""
    return shared / union if union else 0.0


def greedy_responses(samples: Path) -> dict[str, str]:
    """Read the greedy response to each problem from a samples file of ``nemo-grpo eval``."""
    try:
        lines = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
        return {line["id"]: line["greedy_completion"] for line in lines}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--samples {samples} cannot be read ({error}); give a samples-NAME.jsonl of nemo-grpo eval"
        ) from error


def _within(box: Box | None, size: tuple[int, int]) -> Box | None:
    """Cut a box to the picture; None if nothing is left."""
    if box is None:
        return None
    width, height = size
    left = max(box[0], 0.0)
    top = max(box[1], 0.0)
    right = min(box[2], width)
    bottom = min(box[3], height)
    is_empty = left >= right or top >= bottom
    return None if is_empty else (left, top, right, bottom)


@app.command()
def masks(
    samples: Annotated[Path, typer.Option(help="samples-NAME.jsonl of nemo-grpo eval.")],
    data: Annotated[Path, typer.Option(help="The benchmark's JSONL file.")],
    sam: Annotated[Path, typer.Option(help="Folder of a Segment Anything model.")],
    device: Annotated[str, typer.Option(help="Device of that model.")] = "cpu",
) -> None:
    """Make masks of the boxes in greedy responses, and compare them with the targets: gIoU and cIoU."""
    problems = read_problems([data], with_images=True)
    responses = greedy_responses(samples)
    scores = score_masks(problems, responses, SamMasks(sam, device))
    out = samples.with_name(samples.name.replace("samples-", "masks-", 1)).with_suffix(".json")
    result = {"samples": str(samples), "data": str(data), "sam": str(sam), **asdict(scores)}
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    typer.echo(
        f"gIoU {100 * scores.giou:.1f}, cIoU {100 * scores.ciou:.1f} over {len(scores.ious)} images, "
        f"{scores.num_boxes} with a box; {out}"
    )


if __name__ == "__main__":
    main(app)
