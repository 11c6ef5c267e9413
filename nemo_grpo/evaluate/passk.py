"""Estimators over repeated samples of one problem, and their mean over problems."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from nemo_grpo.support.errors import UserError
from nemo_grpo.tasks.rewards.math_grader import verdict_on_texts

MOST_COMPARISONS = 200
"""Limit on the pairs of different texts that a vote compares, not counting pairs of integers. 16 answers have
120 pairs. A comparison takes about 15 ms of CPU time."""
MOST_UNDECIDED = 2
"""Comparisons without a verdict after which a vote stops; each costs the grader's full time limit."""

SameAnswer = Callable[[str, str], bool | None]
"""Comparison of two answers, such as 1/2 and 0.5. It returns None without a verdict within the limits. Two
integers must always get a verdict at once."""


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Estimate the probability that at least one of k samples is correct, without bias.

    Implements Chen et al. 2021 (2107.03374) Eq. 1:  1 - C(n - c, k) / C(n, k)

    Args:
        num_samples: n.
        num_correct: c, the correct ones of the n samples.
        k: 1 <= k <= n.

    Returns:
        A probability in [0, 1]; c / n for k = 1.
    """
    assert 0 <= num_correct <= num_samples, (num_samples, num_correct)
    assert 1 <= k <= num_samples, (num_samples, k)
    # Exact integers and one division, instead of the paper's product, which rounds at every factor.
    return 1 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def parse_ks(listed: str | None, num_samples: int) -> tuple[int, ...]:
    """Read ``3,5`` as numbers between 1 and the number of samples."""
    if listed is None:
        return ()
    parts = [part.strip() for part in listed.split(",") if part.strip()]
    numbers = [int(part) for part in parts if part.isdecimal()]
    if len(numbers) < len(parts) or not all(1 <= number <= num_samples for number in numbers):
        raise UserError(
            f"--pass-at {listed}: pass@k is estimated for k between 1 and the {num_samples} samples; name "
            "such numbers, or raise --k"
        )
    return tuple(numbers)


@dataclass(frozen=True)
class Majority:
    """Outcome of a vote.

    Attributes:
        score: score of the winning answer.
        cut_short: True if a limit stopped the comparisons, so that equal answers may count separately.
    """

    score: float
    cut_short: bool = False


def majority_at_k(
    answers: Sequence[str | None],
    scores: Sequence[float],
    same: SameAnswer = operator.eq,
    hopeless: Collection[str] = (),
) -> Majority:
    """Find the score of the most frequent answer; ties go to the earliest.

    Args:
        answers: normalised answer of each sample; None does not vote.
        scores: score of each sample.
        same: compares two answers. After `MOST_COMPARISONS` calls, or `MOST_UNDECIDED` calls without a
            verdict, the remaining answers count as equal only if their texts are equal.
        hopeless: answers that could not be compared with this problem's reference in time. Each comparison
            with another answer would run into the time limit too, so only equal texts count as equal.

    Returns:
        The score of the first sample that gave the winning answer; 0 if no sample has an answer.
    """
    counts = Counter(answer for answer in answers if answer is not None)
    # Equal answers with different texts (1/2 and 0.5) form one kind. Its first answer is its name here.
    votes: Counter[str] = Counter()
    comparisons = _Comparisons(same, hopeless)
    for answer, count in counts.items():
        votes[_kind_of(answer, votes, comparisons)] += count
    if not votes:
        return Majority(0.0)
    [(winner, _)] = votes.most_common(1)  # of equal counts, the first one
    return Majority(scores[answers.index(winner)], comparisons.cut_short)


def _kind_of(answer: str, kinds: Iterable[str], comparisons: _Comparisons) -> str:
    """Return the first of the kinds that equals the answer. If there is none, the answer is a new kind."""
    for kind in kinds:
        if comparisons.are_equal(kind, answer):
            return kind
    return answer


@dataclass
class _Comparisons:
    """Comparisons of one vote, with the counts for its limits.

    Attributes:
        same: see `majority_at_k`.
        hopeless: see `majority_at_k`.
        num_compared: comparisons that were counted so far.
        num_undecided: comparisons without a verdict so far.
        cut_short: True as soon as one comparison was skipped or had no verdict.
    """

    same: SameAnswer
    hopeless: Collection[str]
    num_compared: int = 0
    num_undecided: int = 0
    cut_short: bool = False

    def are_equal(self, kind: str, answer: str) -> bool:
        """Return True if two different texts give the same answer."""
        if self.same is operator.eq:
            return False
        # Integers and words are compared without a worker, and so count towards no limit.
        if verdict_on_texts(kind, answer) is not None:
            return bool(self.same(kind, answer))
        verdict = self._verdict(kind, answer)
        if verdict is None:
            self.cut_short = True
        return bool(verdict)

    def _verdict(self, kind: str, answer: str) -> bool | None:
        """Compare two answers, or return None if the comparison has no verdict or a limit forbids it."""
        if kind in self.hopeless or answer in self.hopeless:
            return None
        if self.num_compared == MOST_COMPARISONS or self.num_undecided == MOST_UNDECIDED:
            return None
        self.num_compared += 1
        verdict = self.same(kind, answer)
        if verdict is None:
            self.num_undecided += 1
        return verdict


def mean_and_stderr(values: Sequence[float]) -> tuple[float, float]:
    """Compute the mean and its standard error, std (ddof 1) / sqrt(N); 0 for a single value."""
    # fsum rounds once, so that the order of the problems does not matter.
    num_values = len(values)
    mean = math.fsum(values) / num_values
    if num_values == 1:
        return mean, 0.0
    variance = math.fsum((value - mean) ** 2 for value in values) / (num_values - 1)
    return mean, math.sqrt(variance / num_values)


def stderr_of_runs(values: Sequence[Sequence[float]]) -> float:
    """Compute the standard error of a mean over fixed problems, if the evaluation is repeated.

    sqrt(sum_i var_i / k_i) / N, with var_i of ddof 1 over the k_i samples of problem i. It shows whether two
    models differ on these problems; for other problems see the error over problems.

    Args:
        values: per problem, the scores of its samples.

    Returns:
        The standard error; 0 if a problem has a single sample.
    """
    if min(map(len, values)) < 2:
        return 0.0
    stderrs = [mean_and_stderr(scores)[1] for scores in values]
    return math.sqrt(math.fsum(stderr**2 for stderr in stderrs)) / len(values)
