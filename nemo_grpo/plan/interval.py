"""How far a prediction may be off: from the errors of steps whose model no constant had seen.

The ends of an interval are the k-th smallest and the k-th largest of seen / predicted. k is the largest for
which at least `COVERAGE` of the steps lie between the ends that the steps of the other models give, since a
recipe's model is new, too; 1 if there is none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import median

COVERAGE = 0.8


@dataclass(frozen=True)
class Seen:
    """Predicted steps of one kind of hardware beside published or measured ones.

    Attributes: what: the steps, for a sentence.  num_steps: compared.
                median, worst: of |predicted / seen - 1|.
                low, high: ends of the interval, in times of the prediction.
                covered: share of the steps between the ends that the other models' steps give.
    """

    what: str
    num_steps: int
    median: float
    worst: float
    low: float
    high: float
    covered: float

    def around(self, seconds: float) -> tuple[float, float]:
        """The interval of a predicted time."""
        return self.low * seconds, self.high * seconds


def seen_of(what: str, ratios: Mapping[str, Sequence[float]]) -> Seen:
    """What predictions were off by, and the interval that follows.

    Args: what: the steps, for a sentence.  ratios: model -> seen / predicted of its steps; at least two.
    """
    found = sorted(ratio for group in ratios.values() for ratio in group)
    fewest = min(len(found) - len(group) for group in ratios.values())
    enough = takewhile(lambda k: _covered(ratios, k) >= COVERAGE, range(1, (fewest + 1) // 2 + 1))
    rank = max(enough, default=1)
    errors = [abs(1 / ratio - 1) for ratio in found]
    low, high = found[rank - 1], found[-rank]
    return Seen(what, len(found), median(errors), max(errors), low, high, _covered(ratios, rank))


def _covered(ratios: Mapping[str, Sequence[float]], rank: int) -> float:
    inside = total = 0
    for model, group in ratios.items():
        others = sorted(ratio for name, other in ratios.items() if name != model for ratio in other)
        inside += sum(others[rank - 1] <= ratio <= others[-rank] for ratio in group)
        total += len(group)
    return inside / total


PUBLISHED = {
    "h100": Seen("published steps on H100", 26, 0.106, 0.299, 0.77, 1.29, 0.846),
    "gb200": Seen("published steps on GB200", 18, 0.23, 0.564, 0.697, 2.3, 0.611),
}
"""Steps of NeMo-RL, each predicted by constants that were fitted without its model
(`benchmarks/plan_vs_published.py --errors`)."""

OTHER = Seen("published steps, none of them on such GPUs", 44, 0.145, 0.564, 0.697, 2.3, 0.864)
"""The same of all GPUs together, for the others."""

MEASURED = Seen("steps measured on a CPU without other work", 5, 0.0751, 0.118, 0.93, 1.13, 0.6)
"""Measured steps of the embedded engine on a CPU (`benchmarks/plan_vs_this_machine.py`)."""
