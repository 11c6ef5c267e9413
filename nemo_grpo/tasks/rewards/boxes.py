"""Bounding boxes in answers, and how much two of them overlap."""

import math
import re

Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""

_NUMBER = re.compile(r"(?<![\w.])-?\d{1,9}(?:\.\d{1,9})?(?!\w|\.\d)")
MAX_NUMBERS = 4


def parse_box(answer: str) -> Box | None:
    """The four numbers of an answer such as ``(10,20),(30,40)`` or ``[10, 20, 30, 40]``.

    Returns: the box with its corners in order; None unless there are exactly four numbers.
    """
    numbers = []
    for match in _NUMBER.finditer(answer):
        numbers.append(float(match[0]))
        if len(numbers) > MAX_NUMBERS:
            return None
    if len(numbers) != MAX_NUMBERS:
        return None
    x1, y1, x2, y2 = numbers
    return min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)


def intersection_over_union(a: Box, b: Box) -> float:
    """Area of the intersection over area of the union, in [0, 1]; 0 where both boxes are empty."""
    shared, union = shared_and_union(a, b)
    return shared / union if union > 0 and math.isfinite(union) else 0.0


def generalized_iou(a: Box, b: Box) -> float:
    """IoU less the part of the boxes' hull that neither covers, in [-1, 1]; 0 where both boxes are empty."""
    _, union = shared_and_union(a, b)
    hull = _area((min(a[0], b[0]), min(a[1], b[1]), max(a[2], b[2]), max(a[3], b[3])))
    if not 0 < hull < math.inf:
        return 0.0
    return intersection_over_union(a, b) - (hull - union) / hull


def shared_and_union(a: Box, b: Box | None) -> tuple[float, float]:
    """Areas of intersection and union; of one box alone 0 and its own area."""
    if b is None:
        return 0.0, _area(a)
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    shared = max(0.0, width) * max(0.0, height)
    return shared, _area(a) + _area(b) - shared


def _area(box: Box) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])
