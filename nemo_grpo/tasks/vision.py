"""Vision tasks of GPG: grounding, classification, counting, geometry. For the cluster engine only.

Problems are JSONL with ``metadata.images``, paths relative to the file. Answers stand in ``<answer>`` tags.
"""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path
from typing import ClassVar, Literal

from nemo_grpo.errors import UserError
from nemo_grpo.tasks.base import FORMAT, Answered, Problem
from nemo_grpo.tasks.jsonl import FileTask, FileTaskConfig
from nemo_grpo.tasks.mathematics import MathFiles
from nemo_grpo.tasks.response import extract_answer, format_reward
from nemo_grpo.tasks.rewards.boxes import (
    generalized_iou,
    intersection_over_union,
    parse_box,
    shared_and_union,
)
from nemo_grpo.tasks.rewards.forms import Form, with_opened_think

_NO_COUNT = "<>\u2264\u2265\u2260\u2248\u00b1"
_COUNT = re.compile(
    rf"(?<![\w.,\u2212\u2013{_NO_COUNT}-])(?<![{_NO_COUNT}]\s)\d{{1,9}}(?:\.0{{1,9}})?(?![\w,]|\.\d|\s?%)"
)
_SIGN = re.compile(r"(?<=\w)[+#]+(?!\w)|(?<!\w)-(?=\d)|(?<=\d)\.(?=\d)")
"""What makes another label: ``C++``, ``A+``, ``-5``, ``1.5``."""
_COLORS = ("red", "green", "blue", "black")


class VisionConfig(FileTaskConfig):
    """Parameters of every vision task."""

    needs_images: ClassVar[bool] = True

    think_is_open: bool = False
    """The prompt ends with ``<think>``, by its response_prefix or by the chat template."""


class _Vision(FileTask):
    """What the vision tasks share."""

    def extract(self, response: str) -> str | None:
        return extract_answer(response)

    def _format(self, response: str) -> float:
        return format_reward(with_opened_think(response, self.config.think_is_open))


class VisionGroundingConfig(VisionConfig):
    """Parameters of `VisionGrounding`."""

    reward_components: ClassVar = {
        "accuracy": "1: the box has an IoU of at least iou_threshold with the reference; 0: it does not",
        "format": FORMAT,
        "iou": "intersection over union of box and reference; 0 without a box",
        "giou": "generalized IoU + 1, in [0, 2]; 0 without a box",
    }

    name: Literal["vision_grounding"] = "vision_grounding"
    iou_threshold: float = 0.5
    """Minimum IoU that counts as found."""

    def build(self) -> VisionGrounding:
        return VisionGrounding(self)

    def made_up_problem(self, number: int, folder: Path) -> Problem:
        left, top, side = 8 * (number % 4), 8 * (number // 4 % 4), 24
        image = _square(folder, number, (left, top, left + side, top + side))
        answer = f"({left},{top}),({left + side},{top + side})"
        return Problem(f"square-{number}", f"the square of picture {number}", answer, {"images": [image]})


class VisionGrounding(_Vision):
    """Answer: ``(x1,y1),(x2,y2)`` in pixels, as Qwen2.5-VL writes boxes."""

    def __init__(self, config: VisionGroundingConfig) -> None:
        """Raises: UserError: a reference is not a box."""
        super().__init__(config)
        self.check_answers(parse_box, "is not a box of 4 numbers")

    def score(self, problem: Problem, response: str) -> dict[str, float]:
        reference, box = parse_box(problem.answer), parse_box(extract_answer(response) or "")
        assert reference is not None
        iou = 0.0 if box is None else intersection_over_union(reference, box)
        found = iou >= self.config.iou_threshold and iou > 0
        giou = 0.0 if box is None else generalized_iou(reference, box) + 1
        return {"accuracy": float(found), "format": self._format(response), "iou": iou, "giou": giou}

    def overall(self, answered: Answered) -> dict[str, float]:
        """``box_miou``: mean IoU of all responses; ``box_ciou``: sum of intersections / sum of unions."""
        pairs = [
            (parse_box(problem.answer), parse_box(extract_answer(response) or ""))
            for problem, responses in answered
            for response in responses
        ]
        areas = [shared_and_union(reference, box) for reference, box in pairs if reference is not None]
        shared, union = (sum(column) for column in zip(*areas, strict=True))
        ious = [one / of if of > 0 else 0.0 for one, of in areas]
        return {"box_miou": sum(ious) / len(ious), "box_ciou": shared / union if union > 0 else 0.0}


class VisionClassificationConfig(VisionConfig):
    """Parameters of `VisionClassification`."""

    name: Literal["vision_classification"] = "vision_classification"

    def build(self) -> VisionClassification:
        return VisionClassification(self)

    def made_up_problem(self, number: int, folder: Path) -> Problem:
        image, color = _square(folder, number), _COLORS[number % len(_COLORS)]
        return Problem(f"color-{number}", f"The color of picture {number}?", color, {"images": [image]})


class VisionClassification(_Vision):
    """Answer: a label; case, spaces, punctuation and underscores do not matter, signs as in ``C++`` do.

    Of a problem with ``metadata.choices`` the answer is a letter, (A) for the first; the choice's own words
    count too, as in VisualThinker-R1-Zero's evaluation on CV-Bench.
    """

    def __init__(self, config: VisionClassificationConfig) -> None:
        """Raises: UserError: choices are not a list of texts."""
        super().__init__(config)
        for problem in (*self.train, *self.validation):
            choices = problem.metadata.get("choices") or []
            if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
                raise UserError(
                    f"problem {problem.id!r}: metadata.choices={choices!r} must be a list of texts, (A) first"
                )

    def extract(self, response: str) -> str | None:
        answer = extract_answer(response)
        return None if answer is None else _label(answer)

    def score(self, problem: Problem, response: str) -> dict[str, float]:
        correct = self.extract(response) in _right_answers(problem)
        return {"accuracy": float(correct), "format": self._format(response)}


class VisionCountingConfig(VisionConfig):
    """Parameters of `VisionCounting`."""

    name: Literal["vision_counting"] = "vision_counting"

    def build(self) -> VisionCounting:
        return VisionCounting(self)

    def made_up_problem(self, number: int, folder: Path) -> Problem:
        image = _square(folder, number)
        return Problem(f"count-{number}", f"How many squares has picture {number}?", "1", {"images": [image]})


class VisionCounting(_Vision):
    """Answer: a whole number, the only one in the answer block."""

    def __init__(self, config: VisionCountingConfig) -> None:
        """Raises: UserError: a reference is not a whole number."""
        super().__init__(config)
        self.check_answers(_count, "is not a whole number")

    def extract(self, response: str) -> str | None:
        number = _count(extract_answer(response) or "")
        return None if number is None else str(number)

    def score(self, problem: Problem, response: str) -> dict[str, float]:
        correct = self.extract(response) == str(_count(problem.answer))
        return {"accuracy": float(correct), "format": self._format(response)}


class VisionMathConfig(VisionConfig):
    """Parameters of `VisionMath`."""

    name: Literal["vision_math"] = "vision_math"
    form: Form = "think_answer"
    """What ``format`` rewards, as for the task math."""

    def build(self) -> VisionMath:
        return VisionMath(self)

    def made_up_problem(self, number: int, folder: Path) -> Problem:
        image, color = _square(folder, number), number % len(_COLORS)
        values = ", ".join(f"{name} {value}" for value, name in enumerate(_COLORS, 1))
        question = f"Of {values}: what is the square's color + {number // len(_COLORS) + 1}?"
        total = color + 1 + number // len(_COLORS) + 1
        return Problem(f"color-sum-{number}", question, str(total), {"images": [image]})


class VisionMath(MathFiles):
    """Mathematics about an image (GEOQA), graded as the task math."""


def _square(folder: Path, number: int, corners: tuple[int, int, int, int] = (16, 16, 40, 40)) -> str:
    """A picture of 56 x 56 pixels with a colored square for a made-up problem; returns its name."""
    from PIL import Image, ImageDraw

    folder.mkdir(parents=True, exist_ok=True)
    image = Image.new("RGB", (56, 56), "white")
    ImageDraw.Draw(image).rectangle(corners, fill=_COLORS[number % len(_COLORS)])
    image.save(folder / f"{number}.png")
    return f"{number}.png"


def _right_answers(problem: Problem) -> list[str]:
    """The label, and the words of the choice that it is the letter of."""
    label, choices = _label(problem.answer), problem.metadata.get("choices") or []
    number = ord(label) - ord("a") if len(label) == 1 else -1
    return [label, *([_label(choices[number])] if 0 <= number < len(choices) else [])]


def _label(answer: str) -> str:
    """Its letters, marks, digits and signs, in words; all of the text where there are none."""
    text = unicodedata.normalize("NFC", answer).casefold()
    signs = {place for found in _SIGN.finditer(text) for place in range(*found.span())}
    parts = (
        character if place in signs or unicodedata.category(character)[0] in "LMN" else " "
        for place, character in enumerate(text)
    )
    return " ".join("".join(parts).split()) or text.strip()


def _count(answer: str) -> int | None:
    """The text's only number, if it is a non-negative integer."""
    found = None
    for match in _COUNT.finditer(answer):
        if found is not None:
            return None
        found = int(match[0].partition(".")[0])
    return found
