"""Estimators over repeated samples of one problem, and their mean over problems."""

import math
import operator
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from nemo_grpo.support.errors import UserError
from nemo_grpo.tasks.rewards.math_grader import verdict_on_texts

MOST_COMPARISONS = 200
"""Most pairs of different texts that a vote compares, not counting pairs of integers; 16 answers have 120
pairs. A comparison takes about 15 ms of CPU time."""
MOST_UNDECIDED = 2
"""Comparisons without a verdict after which a vote stops; each costs the grader's full time limit."""

SameAnswer = Callable[[str, str], bool | None]
"""Compares two answers, such as 1/2 and 0.5; None: no verdict within the limits. Integers must always get one
at once."""


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased probability that at least one of k samples is correct.

    Implements Chen et al. 2021 (2107.03374) Eq. 1:  1 - C(n - c, k) / C(n, k)

    Args:    num_samples: n, drawn.  num_correct: c of them.  k: 1 <= k <= n.
    Returns: in [0, 1]; c / n for k = 1. Exact integers, one division.
    """
    assert 0 <= num_correct <= num_samples, (num_samples, num_correct)
    assert 1 <= k <= num_samples, (num_samples, k)
    return 1 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def parse_ks(text: str | None, num_samples: int) -> tuple[int, ...]:
    """Read ``3,5`` as numbers between 1 and the number of samples."""
    parts = [part.strip() for part in (text or "").split(",") if part.strip()]
    numbers = [int(part) for part in parts if part.isdecimal()]
    if len(numbers) < len(parts) or not all(1 <= number <= num_samples for number in numbers):
        raise UserError(
            f"--pass-at {text}: pass@k is estimated for k between 1 and the {num_samples} samples; name such "
            "numbers, or raise --k"
        )
    return tuple(numbers)


@dataclass(frozen=True)
class Majority:
    """Outcome of a vote.  Attributes: cut_short: a limit was hit; equal answers may count separately."""

    score: float
    cut_short: bool = False


def majority_at_k(
    answers: Sequence[str | None],
    scores: Sequence[float],
    same: SameAnswer = operator.eq,
    hopeless: Collection[str] = (),
) -> Majority:
    """Find the score of the most frequent answer; ties go to the earliest.

    Args:    answers: normalised; None does not vote.  scores: of the same samples.
             same: compares with the first answer of each kind, at most `MOST_COMPARISONS` times and until
             `MOST_UNDECIDED` comparisons had no verdict; then answers are equal only if their texts are.
             hopeless: answers that could not be compared with this problem's reference. Comparing them with
             every other answer would take long, so they too are equal only if their texts are.
    Returns: the score of the first sample that gave the winning answer; 0 if nobody voted.
    """
    texts = Counter(answer for answer in answers if answer is not None)
    votes: Counter[str] = Counter()
    asked = _Asked(same, hopeless)
    for text, count in texts.items():
        votes[next((kind for kind in votes if asked.are_one(kind, text)), text)] += count
    if not votes:
        return Majority(0.0)
    (winner, _), *_ = votes.most_common(1)  # equal counts: the first one
    return Majority(scores[answers.index(winner)], asked.cut_short)


@dataclass
class _Asked:
    """Compares the answers of one vote, within the limits."""

    same: SameAnswer
    hopeless: Collection[str]
    num_asked: int = 0
    num_undecided: int = 0
    cut_short: bool = False

    def are_one(self, kind: str, text: str) -> bool:
        """True if two different texts give the same answer."""
        if self.same is operator.eq:
            return False
        if verdict_on_texts(kind, text) is not None:
            return bool(self.same(kind, text))
        verdict = self._verdict(kind, text)
        self.cut_short |= verdict is None
        return bool(verdict)

    def _verdict(self, kind: str, text: str) -> bool | None:
        if kind in self.hopeless or text in self.hopeless:
            return None
        if self.num_asked == MOST_COMPARISONS or self.num_undecided == MOST_UNDECIDED:
            return None
        self.num_asked += 1
        verdict = self.same(kind, text)
        self.num_undecided += verdict is None
        return verdict


def mean_and_stderr(values: Sequence[float]) -> tuple[float, float]:
    """Compute the mean and its standard error, std (ddof 1) / sqrt(N); 0 for a single value."""
    num = len(values)
    mean = math.fsum(values) / num
    if num == 1:
        return mean, 0.0
    variance = math.fsum((value - mean) ** 2 for value in values) / (num - 1)
    return mean, math.sqrt(variance / num)


def stderr_of_runs(values: Sequence[Sequence[float]]) -> float:
    """Compute the standard error of a mean over fixed problems, if the evaluation is repeated.

    sqrt(sum_i var_i / k_i) / N, with var_i of ddof 1 over the k_i samples of problem i. It shows whether two
    models differ on these problems; for other problems see the error over problems.

    Args:    values: per problem, the scores of its samples.
    Returns: 0 if a problem has a single sample.
    """
    if min(map(len, values)) < 2:
        return 0.0
    return math.sqrt(math.fsum(mean_and_stderr(scores)[1] ** 2 for scores in values)) / len(values)
