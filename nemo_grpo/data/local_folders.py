"""Data sets with images that are in no repository as a whole: from a folder that the user puts together."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_grpo.data.fields import Row

REASON_SEG = "the ReasonSeg folder that github.com/dvlab-research/LISA links to"
PROMPTS = "R1-V/src/eval/prompts/geoqa_test_prompts.jsonl of github.com/AMAP-ML/GPG"
SPLITS = "Visual-RFT/classification/val_data of github.com/AMAP-ML/GPG"
QUESTION = (
    "This is an image containing {kind}. Please identify the {what} of the {thing} based on the image.\n"
    "Output the thinking process in <think> </think> and final answer in <answer> </answer> tags."
    "The output answer format should be as follows:\n"
    "<think> ... </think> <answer>species name</answer>\nPlease strictly follow the format."
)
"""Visual-RFT's evaluation asks so, as its training sets do."""


@dataclass(frozen=True)
class LocalFolder:
    """What these origins share."""

    @property
    def revision(self) -> str | None:
        return None

    def resolve(self, revision: str | None) -> str:
        raise FileNotFoundError("it is in no repository")


@dataclass(frozen=True)
class ReasonSeg(LocalFolder):
    """LISA's ReasonSeg. One split: ``<split>/*.jpg``, each with ``<same name>.json`` (LabelMe).

    A row has the first text as query and the box around all polygons with the label ``target``:
    ``(x1,y1),(x2,y2)`` in whole pixels of the image; and the polygons, for masks.

    Deviation: Visual-RFT's preparation takes the box of the first polygon alone, whatever its label.
    """

    split: str

    @property
    def label(self) -> str:
        return f"ReasonSeg ({self.split})"

    def instructions(self, revision: str | None) -> str:
        return f"download {REASON_SEG}, with {self.split}/*.jpg and {self.split}/*.json, to DIR"

    def rows(self, revision: str, folder: Path | None) -> Iterator[Row]:
        assert folder is not None
        images = sorted((folder / self.split).glob("*.jpg"))
        if not images:
            raise FileNotFoundError(f"{folder / self.split} has no *.jpg")
        for image in images:
            notes = json.loads(image.with_suffix(".json").read_text(encoding="utf-8", errors="replace"))
            query = notes["text"][0] if isinstance(notes["text"], list) else notes["text"]
            shapes = notes["shapes"]
            yield {
                "query": query,
                "box": target_box(shapes),
                "image": {"path": str(image)},
                "target": polygons(shapes, "target"),
                "ignore": polygons(shapes, "ignore"),
            }


def polygons(shapes: list[dict[str, Any]], label: str) -> list[list[list[float]]]:
    """The polygons of this label, each a list of [x, y]."""
    return [shape["points"] for shape in shapes if shape["label"] == label]


def target_box(shapes: list[dict[str, Any]]) -> str:
    """The smallest box around every ``target`` polygon; empty if there is none."""
    points = [point for polygon in polygons(shapes, "target") for point in polygon]
    if not points:
        return ""
    xs, ys = zip(*points, strict=True)
    return f"({round(min(xs))},{round(min(ys))}),({round(max(xs))},{round(max(ys))})"


@dataclass(frozen=True)
class GeoQATest(LocalFolder):
    """R1-V's direct-answer form of GEOQA's test set: its list of prompts, and Geo170K's images."""

    @property
    def label(self) -> str:
        return "GEOQA, R1-V's geoqa_test_prompts.jsonl"

    def instructions(self, revision: str | None) -> str:
        return (
            f"download {PROMPTS} to DIR, and Luckyjhg/Geo170K's images.zip, unpacked to DIR/Geo170K, so that "
            "DIR/Geo170K/images/test/0.png is there"
        )

    def rows(self, revision: str, folder: Path | None) -> Iterator[Row]:
        assert folder is not None
        for line in (folder / Path(PROMPTS.split()[0]).name).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            yield {**row, "image": {"path": str(_present(folder / row["image_path"]))}}


CLASSIFICATION = {
    "oxford_flowers": ("a plant", "species", "Oxford Flowers' jpg/*.jpg"),
    "pets": ("a pet", "species", "Oxford-IIIT Pets' images/*.jpg"),
    "fgvc_aircraft": ("an aircraft", "model", "fgvc-aircraft-2013b's data/images/*.jpg"),
    "stanford_cars": ("a car", "model", "Stanford Cars' cars_test/*.jpg"),
}
"""Split -> what the question calls the picture's thing and its class, and where the pictures come from."""


@dataclass(frozen=True)
class ClassificationTest(LocalFolder):
    """A test set of Visual-RFT's fine-grained classification: ``<split>.pth`` (image ->
    label), ``<split>.txt`` (a class a line), and the publisher's pictures anywhere in the folder.
    """

    split: str

    @property
    def label(self) -> str:
        return f"Visual-RFT's {self.split}"

    def instructions(self, revision: str | None) -> str:
        pictures = CLASSIFICATION[self.split][2]
        return f"download {self.split}.pth and {self.split}.txt from {SPLITS}, and {pictures}, to DIR"

    def rows(self, revision: str, folder: Path | None) -> Iterator[Row]:
        import torch

        assert folder is not None
        names = (folder / f"{self.split}.txt").read_text(encoding="utf-8").splitlines()
        listed = torch.load(
            _present(folder / f"{self.split}.pth"), weights_only=True
        )  # tensors; runs no code
        files = {path.name: path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg")}
        kind, what, _ = CLASSIFICATION[self.split]
        question = QUESTION.format(kind=kind, what=what, thing=kind.split()[-1])
        for row in listed:
            for path, entry in row.items():
                image = _present(files.get(Path(path).name, folder / Path(path).name))
                label = names[int(entry["label"])].strip()
                yield {"question": question, "label": label, "image": {"path": str(image)}}


def _present(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    return path
