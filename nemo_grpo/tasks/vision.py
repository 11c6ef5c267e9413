"""Vision tasks of GPG: grounding, classification, counting, geometry. For the cluster engine only.

Problems are JSONL with ``metadata.images``, paths relative to the file. Answers stand in ``<answer>`` tags.
"""

from __future__ import annotations

import math
import re
import unicodedata
from pathlib import Path
from typing import Any, ClassVar, Literal

from nemo_grpo.support.errors import UserError
from nemo_grpo.tasks.base import FORMAT, Answered, Problem, Task
from nemo_grpo.tasks.jsonl import FileTask, FileTaskConfig
from nemo_grpo.tasks.mathematics import MathFiles
from nemo_grpo.tasks.response import extract_answer, format_reward
from nemo_grpo.tasks.rewards.format_reward import Form, with_opened_think

_NO_COUNT = "<>\u2264\u2265\u2260\u2248\u00b1"
_COUNT = re.compile(
    rf"(?<![\w.,\u2212\u2013{_NO_COUNT}-])(?<![{_NO_COUNT}]\s)\d{{1,9}}(?:\.0{{1,9}})?(?![\w,]|\.\d|\s?%)"
)
_SIGN = re.compile(r"(?<=\w)[+#]+(?!\w)|(?<!\w)-(?=\d)|(?<=\d)\.(?=\d)")
"""Signs that distinguish labels: ``C++``, ``A+``, ``-5``, ``1.5``."""
Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""
_NUMBER = re.compile(r"(?<![\w.])-?\d{1,9}(?:\.\d{1,9})?(?!\w|\.\d)")
MAX_NUMBERS = 4
"""Numbers of a box."""
_COLORS = ("red", "green", "blue", "black")


class _Vision(FileTask):
    def extract(self, response: str) -> str | None:
        # If the prompt opens a thought and the response never closes it, the response has no answer.
        return extract_answer(with_opened_think(response, self.config.think_is_open))

    def score(self, problem: Problem, response: str) -> dict[str, float]:
        whole_response = with_opened_think(response, self.config.think_is_open)
        return {
            "accuracy": float(self.is_right(problem, response)),
            "format": format_reward(whole_response),
        }

    def is_right(self, problem: Problem, response: str) -> bool:
        raise NotImplementedError


class VisionGrounding(_Vision):
    """Asks where an object is; the answer is ``(x1,y1),(x2,y2)`` in pixels, as Qwen2.5-VL writes boxes."""

    def __init__(self, config: VisionGroundingConfig) -> None:
        super().__init__(config)
        self.check_answers(parse_box, "is not a box of 4 numbers")

    def score(self, problem: Problem, response: str) -> dict[str, float]:
        reference, box = self._boxes(problem, response)
        # Shift it from [-1, 1] to [0, 2], so that 0, the value without a box, is the worst.
        giou = 0.0 if box is None else generalized_iou(reference, box) + 1
        return {**super().score(problem, response), "iou": _iou(reference, box), "giou": giou}

    def is_right(self, problem: Problem, response: str) -> bool:
        iou = _iou(*self._boxes(problem, response))
        # Boxes that do not overlap are wrong even with a threshold of 0.
        return iou >= self.config.iou_threshold and iou > 0

    def overall(self, answered: Answered) -> dict[str, float]:
        """Return ``box_miou``, the mean IoU of all responses, and ``box_ciou``, their cumulative IoU.

        The cumulative IoU divides the sum of all intersections by the sum of all unions.
        """
        pairs = [self._boxes(problem, response) for problem, responses in answered for response in responses]
        areas = [shared_and_union(*pair) for pair in pairs]
        ious = [_ratio(shared, union) for shared, union in areas]
        total_shared = sum(shared for shared, _ in areas)
        total_union = sum(union for _, union in areas)
        return {"box_miou": sum(ious) / len(ious), "box_ciou": _ratio(total_shared, total_union)}

    def _boxes(self, problem: Problem, response: str) -> tuple[Box, Box | None]:
        """Return the reference, and the response's box, which is None if it has none."""
        reference = parse_box(problem.answer)
        assert reference is not None  # checked when the task was built
        return reference, parse_box(self.extract(response) or "")


class VisionClassification(_Vision):
    """Asks for a label. Case, spaces, punctuation and underscores do not matter; signs as in ``C++`` do.

    With ``metadata.choices`` the answer is a letter, (A) for the first; the choice's own words count too, as
    in VisualThinker-R1-Zero's evaluation on CV-Bench.
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__(config)
        for problem in (*self.train, *self.validation):
            choices = problem.metadata.get("choices") or []
            if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
                raise UserError(
                    f"problem {problem.id!r}: metadata.choices={choices!r} must be a list of texts, (A) first"
                )

    def extract(self, response: str) -> str | None:
        answer = super().extract(response)
        return None if answer is None else _label(answer)

    def is_right(self, problem: Problem, response: str) -> bool:
        label = _label(problem.answer)
        accepted = [label]
        choices = problem.metadata.get("choices") or []
        if len(label) == 1:
            number = ord(label) - ord("a")
            if 0 <= number < len(choices):
                accepted.append(_label(choices[number]))
        return self.extract(response) in accepted


class VisionCounting(_Vision):
    """Asks how many objects there are; the answer is the only number in the answer block."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__(config)
        self.check_answers(_count, "is not a whole number")

    def extract(self, response: str) -> str | None:
        number = _count(super().extract(response) or "")
        return None if number is None else str(number)

    def is_right(self, problem: Problem, response: str) -> bool:
        return self.extract(response) == str(_count(problem.answer))


class VisionConfig(FileTaskConfig):
    """Parameters of every vision task."""

    needs_images: ClassVar[bool] = True
    task: ClassVar[Any]

    think_is_open: bool = False
    """The prompt ends with ``<think>``, by its response_prefix or by the chat template."""

    def build(self) -> Task:
        return self.task(self)

    def made_up_problem(self, number: int, folder: Path) -> Problem:
        """Make a picture of 56 x 56 pixels with a colored square, and ask about it."""
        from PIL import Image, ImageDraw

        name = f"{number}.png"
        left = 8 * (number % 4)
        top = 8 * (number // 4 % 4)
        side = 24
        corners = (left, top, left + side, top + side)
        folder.mkdir(parents=True, exist_ok=True)
        image = Image.new("RGB", (56, 56), "white")
        ImageDraw.Draw(image).rectangle(corners, fill=_COLORS[number % len(_COLORS)])
        image.save(folder / name)
        question, answer = self.made_up_question(number, corners)
        return Problem(f"square-{number}", question, answer, {"images": [name]})

    def made_up_question(self, number: int, corners: tuple[int, int, int, int]) -> tuple[str, str]:
        """Return question and answer about the square of picture ``number``."""
        raise NotImplementedError


class VisionGroundingConfig(VisionConfig):
    """Parameters of `VisionGrounding`."""

    task = VisionGrounding
    reward_components: ClassVar = {
        "accuracy": "1: the box has an IoU of at least iou_threshold with the reference; 0: it does not",
        "format": FORMAT,
        "iou": "intersection over union of box and reference; 0 without a box",
        "giou": "generalized IoU + 1, in [0, 2]; 0 without a box",
    }

    name: Literal["vision_grounding"] = "vision_grounding"
    iou_threshold: float = 0.5
    """Minimum IoU that counts as found."""

    def made_up_question(self, number: int, corners: tuple[int, int, int, int]) -> tuple[str, str]:
        left, top, right, bottom = corners
        return f"the square of picture {number}", f"({left},{top}),({right},{bottom})"


class VisionClassificationConfig(VisionConfig):
    """Parameters of `VisionClassification`."""

    task = VisionClassification
    name: Literal["vision_classification"] = "vision_classification"

    def made_up_question(self, number: int, corners: tuple[int, int, int, int]) -> tuple[str, str]:
        return f"The color of picture {number}?", _COLORS[number % len(_COLORS)]


class VisionCountingConfig(VisionConfig):
    """Parameters of `VisionCounting`."""

    task = VisionCounting
    name: Literal["vision_counting"] = "vision_counting"

    def made_up_question(self, number: int, corners: tuple[int, int, int, int]) -> tuple[str, str]:
        return f"How many squares has picture {number}?", "1"


class VisionMathConfig(VisionConfig):
    """Parameters of mathematics about an image (GEOQA), which is graded as the task math."""

    task = MathFiles
    name: Literal["vision_math"] = "vision_math"
    form: Form = "think_answer"
    """Form that ``format`` rewards, as for the task math."""

    def made_up_question(self, number: int, corners: tuple[int, int, int, int]) -> tuple[str, str]:
        value = number % len(_COLORS) + 1
        summand = number // len(_COLORS) + 1
        values = ", ".join(f"{color} {index}" for index, color in enumerate(_COLORS, 1))
        return f"Of {values}: what is the square's color + {summand}?", str(value + summand)


def parse_box(answer: str) -> Box | None:
    """Read the four numbers of an answer such as ``(10,20),(30,40)`` or ``[10, 20, 30, 40]``.

    Returns:
        The box with its corners in order, or None unless there are exactly four numbers.
    """
    numbers: list[float] = []
    for match in _NUMBER.finditer(answer):
        numbers.append(float(match[0]))
        if len(numbers) > MAX_NUMBERS:
            # Do not read a response of a thousand numbers to its end.
            return None
    if len(numbers) != MAX_NUMBERS:
        return None
    x1, y1, x2, y2 = numbers
    return min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)


def intersection_over_union(a: Box, b: Box) -> float:
    """Divide the intersection's area by the union's: in [0, 1]; 0 where both boxes are empty."""
    shared, union = shared_and_union(a, b)
    return shared / union if union > 0 and math.isfinite(union) else 0.0


def generalized_iou(a: Box, b: Box) -> float:
    """Compute IoU minus the share of the hull that neither box covers: in [-1, 1]; 0 for empty boxes."""
    _, union = shared_and_union(a, b)
    hull = _area((min(a[0], b[0]), min(a[1], b[1]), max(a[2], b[2]), max(a[3], b[3])))
    if not 0 < hull < math.inf:
        return 0.0
    return intersection_over_union(a, b) - (hull - union) / hull


def shared_and_union(a: Box, b: Box | None) -> tuple[float, float]:
    """Compute the areas of intersection and union; if ``b`` is None they are 0 and the area of ``a``."""
    if b is None:
        return 0.0, _area(a)
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    shared = max(0.0, width) * max(0.0, height)
    return shared, _area(a) + _area(b) - shared


def _ratio(shared: float, union: float) -> float:
    return shared / union if union > 0 else 0.0


def _area(box: Box) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])


def _iou(reference: Box, box: Box | None) -> float:
    return 0.0 if box is None else intersection_over_union(reference, box)


def _label(answer: str) -> str:
    """Reduce a label to words of letters, digits and signs; a label without any of these stays as it is."""
    text = unicodedata.normalize("NFC", answer).casefold()
    characters = [
        character if unicodedata.category(character)[0] in "LMN" else " "  # letters, marks and numbers
        for character in text
    ]
    for sign in _SIGN.finditer(text):
        characters[sign.start() : sign.end()] = sign[0]
    words = "".join(characters).split()
    return " ".join(words) if words else text.strip()


def _count(answer: str) -> int | None:
    """Read the text's only number, if it is a non-negative integer."""
    count = None
    for match in _COUNT.finditer(answer):
        if count is not None:
            return None  # a second number
        count = int(match[0].partition(".")[0])
    return count
