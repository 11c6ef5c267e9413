"""Image data sets that the user must assemble in a folder, because no repository has all of their files."""

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

    A row has the first text as its query, the polygons with the label ``target``, and the box around all of
    them as ``(x1,y1),(x2,y2)`` in whole pixels of the image.

    Deviation: Visual-RFT's preparation takes the box of the first polygon only, with any label.
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
    """Write the smallest box around all polygons, or "" if there are none."""
    points = [point for polygon in target for point in polygon]
    if not points:
        return ""
    xs, ys = zip(*points, strict=True)
    return f"({round(min(xs))},{round(min(ys))}),({round(max(xs))},{round(max(ys))})"


def geoqa_test(folder: Path, split: str) -> Rows:
    """Read R1-V's version of GEOQA's test set for direct answers: R1-V's prompts with Geo170K's images."""
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

    The folder needs ``<split>.pth`` (image -> number of its class), ``<split>.txt`` (one class per line), and
    the pictures in any subfolder.
    """
    import torch

    class_names = (folder / f"{split}.txt").read_text(encoding="utf-8").splitlines()
    # weights_only, because the file comes from the internet, and a pickle could run any code.
    labels_by_path = torch.load(_present(folder / f"{split}.pth"), weights_only=True)
    pictures = {path.name: path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg")}
    kind, class_word = CLASSIFICATION[split]
    question = QUESTION.format(kind=kind, what=class_word, thing=kind.split()[-1])
    for row in labels_by_path:
        for path, entry in row.items():
            # The paths are those of the authors' machine. Only the file name is of use here.
            file_name = Path(path).name
            image = _present(pictures.get(file_name, folder / file_name))
            label = class_names[int(entry["label"])].strip()
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
        reader: name of a function in `READERS`.
        split: name of the subfolder or files to read.
        label: address of the data set for people.
        download: names the files that the user must put into the folder; part of the instructions.
        revision: always None, because a folder has no commits.
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
