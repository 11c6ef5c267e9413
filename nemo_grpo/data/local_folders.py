"""Data sets with images that no repository holds as a whole, read from a folder that the user assembles."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_grpo.data.fields import Row

QUESTION = (
    "This is an image containing {kind}. Please identify the {what} of the {thing} based on the image.\n"
    "Output the thinking process in <think> </think> and final answer in <answer> </answer> tags."
    "The output answer format should be as follows:\n"
    "<think> ... </think> <answer>species name</answer>\nPlease strictly follow the format."
)
"""Question of Visual-RFT's evaluation and training sets."""


Rows = Iterator[dict[str, Any]]


def reason_seg(folder: Path, split: str) -> Rows:
    """Read LISA's ReasonSeg: ``<split>/*.jpg``, each with ``<same name>.json`` (LabelMe).

    A row has the first text as query and the box around all polygons with the label ``target``:
    ``(x1,y1),(x2,y2)`` in whole pixels of the image; and the polygons, for masks.

    Deviation: Visual-RFT's preparation takes the box of the first polygon alone, whatever its label.
    """
    images = sorted((folder / split).glob("*.jpg"))
    if not images:
        raise FileNotFoundError(f"{folder / split} has no *.jpg")
    for image in images:
        annotation = json.loads(image.with_suffix(".json").read_text(encoding="utf-8", errors="replace"))
        queries = annotation["text"]
        target = polygons(annotation["shapes"], "target")
        yield {
            "query": queries[0] if isinstance(queries, list) else queries,
            "box": box_around(target),
            "image": {"path": str(image)},
            "target": target,
            "ignore": polygons(annotation["shapes"], "ignore"),
        }


def polygons(shapes: list[dict[str, Any]], label: str) -> list[list[list[float]]]:
    """List the polygons of this label, each a list of [x, y]."""
    return [shape["points"] for shape in shapes if shape["label"] == label]


def box_around(target: list[list[list[float]]]) -> str:
    """Write the smallest box around all polygons; empty without any."""
    points = [point for polygon in target for point in polygon]
    if not points:
        return ""
    xs, ys = zip(*points, strict=True)
    return f"({round(min(xs))},{round(min(ys))}),({round(max(xs))},{round(max(ys))})"


def geoqa_test(folder: Path, split: str) -> Rows:
    """Read R1-V's direct-answer form of GEOQA's test set: its list of prompts, and Geo170K's images."""
    for line in (folder / f"{split}.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        yield {**row, "image": {"path": str(_present(folder / row["image_path"]))}}


CLASSIFICATION = {
    "oxford_flowers": ("a plant", "species"),
    "pets": ("a pet", "species"),
    "fgvc_aircraft": ("an aircraft", "model"),
    "stanford_cars": ("a car", "model"),
}
"""Split -> words of the question for the pictured thing and its class."""


def classification_test(folder: Path, split: str) -> Rows:
    """Read a test set of Visual-RFT's fine-grained classification.

    Files: ``<split>.pth`` (image -> label), ``<split>.txt`` (a class a line), and the pictures, anywhere.
    """
    import torch

    names = (folder / f"{split}.txt").read_text(encoding="utf-8").splitlines()
    # weights_only: the file comes from the internet, and a pickle could run any code.
    rows = torch.load(_present(folder / f"{split}.pth"), weights_only=True)
    pictures = {path.name: path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg")}
    kind, what = CLASSIFICATION[split]
    question = QUESTION.format(kind=kind, what=what, thing=kind.split()[-1])
    for row in rows:
        for path, entry in row.items():
            # The paths are those of the authors' machine, of which only the last part is of use.
            file_name = Path(path).name
            image = _present(pictures.get(file_name, folder / file_name))
            label = names[int(entry["label"])].strip()
            yield {"question": question, "label": label, "image": {"path": str(image)}}


def _present(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    return path


READERS: dict[str, Callable[[Path, str], Rows]] = {
    "reason_seg": reason_seg,
    "geoqa_test": geoqa_test,
    "classification_test": classification_test,
}


@dataclass(frozen=True)
class LocalFolder:
    """A split of a folder that the user assembles.

    Attributes:
        reader: a name in `READERS`.
        split: name of a folder or files in it.
        label: address, for people.
        download: files that the user puts into it, for the instructions.
        revision: none; a folder has no commits.
    """

    reader: str
    split: str
    label: str
    download: str
    revision: str | None = None

    def instructions(self, revision: str | None) -> str:
        return f"download {self.download}"

    def resolve(self, revision: str | None) -> str:
        raise FileNotFoundError("it is in no repository")

    def rows(self, revision: str, folder: Path | None) -> Iterator[Row]:
        assert folder is not None
        return READERS[self.reader](folder, self.split)
