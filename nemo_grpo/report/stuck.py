"""Detects runs that cannot learn: no group has signal, all responses are truncated, none has the format.

It reads the metrics of either engine, for the log and for reports.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from nemo_grpo.support.extensions import is_reference

NUM_STEPS = 10
"""Newest steps in which a finding must hold."""
AGAIN_AFTER = 50
"""Steps after which the log repeats a finding that still holds."""
NEARLY_ALL = 0.95
SIGNAL = "groups/valid_fraction"
TRUNCATED = {"length/truncated": 1.0, "train/truncation_rate": 1.0}
ALL_WRONG = {"rollout/all_wrong": 1.0, "baseline_reward/pct_0": 0.01}
ALL_RIGHT = {"rollout/all_right": 1.0, "baseline_reward/pct_1": 0.01}
"""Metric of either engine -> factor that makes it a share."""
LENGTH_KEYS = "policy.generation.max_new_tokens, and policy.max_total_sequence_length with it"
ZERO = 1e-12
"""Largest value that counts as 0."""


def findings(
    rows: Sequence[Mapping[str, Any]],
    weights: Mapping[str, float] | None = None,
) -> list[str]:
    """List reasons why a run does not learn, with numbers and remedies.

    Args:
        rows: metrics of training steps in order, as in metrics.jsonl.
        weights: the recipe's ``nemo_grpo.rewards``. A component without a weight cannot keep a run from
            learning. None means that the weights are unknown.

    Returns:
        One sentence for each reason. There are none for a run that learns or has no steps.
    """
    # Supervised runs have no groups. Their rows are dropped here, so that nothing is found.
    rows = [row for row in rows if _number(row, SIGNAL) is not None][-NUM_STEPS:]
    if not rows:
        return []
    steps = f"step {rows[0]['step']}"
    if len(rows) > 1:
        steps = f"steps {rows[0]['step']} to {rows[-1]['step']}"
    judges_answers = True
    asks_for_form = True
    if weights is not None:
        weighted = [name for name, weight in weights.items() if weight]
        # Components of the task judge answers. A user-defined reward function may judge anything else.
        judges_answers = any(not is_reference(name) for name in weighted)
        asks_for_form = any(name.startswith("format") for name in weighted)
    sentences = [_no_signal(rows, judges_answers=judges_answers), _truncated(rows)]
    if asks_for_form:
        sentences.append(_format(rows))
    sentences.append(_not_finite(rows))
    return [f"{steps}: {sentence}" for sentence in sentences if sentence]


class Watch:
    """Follows a run. Returns a finding as soon as it holds, and again every `AGAIN_AFTER` steps."""

    def __init__(self, max_num_steps: int, weights: Mapping[str, float] | None = None) -> None:
        """Start before the first step.

        Args:
            max_num_steps: number of steps of the run; a short run is judged by all of its steps.
            weights: see `findings`.
        """
        self.weights = weights
        self.rows: deque[Mapping[str, Any]] = deque(maxlen=max(1, min(NUM_STEPS, max_num_steps)))
        self.logged_at: dict[str, int] = {}

    def __call__(self, row: Mapping[str, Any]) -> list[str]:
        """Return findings to log after this step."""
        self.rows.append(row)
        if len(self.rows) < (self.rows.maxlen or 0):
            return []
        step = int(row["step"])
        # The numbers in a sentence change with every step. Its subject stays, and identifies the finding.
        by_subject = {_subject(sentence): sentence for sentence in findings(self.rows, weights=self.weights)}
        # Findings that no longer hold are forgotten, so that they are logged at once when they return.
        self.logged_at = {subject: at for subject, at in self.logged_at.items() if subject in by_subject}
        sentences = []
        for subject, sentence in by_subject.items():
            if subject not in self.logged_at or step - self.logged_at[subject] >= AGAIN_AFTER:
                self.logged_at[subject] = step
                sentences.append(sentence)
        return sentences


def _subject(sentence: str) -> str:
    """Return a finding's sentence without steps and numbers."""
    return sentence.partition(": ")[2].partition(" (")[0]


def _no_signal(rows: Sequence[Mapping[str, Any]], *, judges_answers: bool) -> str | None:
    """Describe a run in which no group has signal.

    Args:
        judges_answers: a component of the task has a weight, so that rewards tell right answers from wrong.
    """
    if not all(row[SIGNAL] <= ZERO for row in rows):
        return None
    wrong = None
    right = None
    if judges_answers:
        wrong = _share(rows, ALL_WRONG)
        right = _share(rows, ALL_RIGHT)
    if wrong is not None and wrong >= 0.5:
        advice = (
            "easier problems, a start that solves some, a larger grpo.num_generations_per_prompt; look at "
            "samples.jsonl for answers in a form that the task does not read"
        )
    elif right is not None and right >= 0.5:
        advice = "harder problems: the policy solves these"
    else:
        advice = "another reward: this one does not tell the responses apart (nemo_grpo.rewards)"
    numbers = []
    if wrong:
        numbers.append(f"{wrong:.0%} of the groups all wrong")
    if right:
        numbers.append(f"{right:.0%} of the groups all right")
    reward = _mean(rows, "reward/mean")
    if reward is not None:
        numbers.append(f"mean reward {reward:.3g}")
    return f"in no group do two rewards differ, so nothing is learnt ({', '.join(numbers)}); try {advice}"


def _truncated(rows: Sequence[Mapping[str, Any]]) -> str | None:
    share = _share(rows, TRUNCATED)
    if share is None or share < NEARLY_ALL:
        return None
    numbers = f"{share:.0%} of them"
    length = _mean(rows, "length/mean")
    if length is not None:
        numbers += f", mean length {length:.0f}"
    return f"nearly all responses are cut off before they end ({numbers}); try more {LENGTH_KEYS}"


def _format(rows: Sequence[Mapping[str, Any]]) -> str | None:
    well_formed = _mean(rows, "reward/format")
    accuracy = _mean(rows, "reward/accuracy")
    if well_formed is None or well_formed > ZERO:
        return None
    # The task has read right answers, so it does not depend on the format.
    if accuracy is not None and accuracy > ZERO:
        return None
    numbers = "format 0" if accuracy is None else f"format 0, accuracy {accuracy:.2g}"
    return (
        f"no response has the form that the task reads ({numbers}); try a prompt that asks for it "
        "(nemo_grpo.prompt), another form (nemo_grpo.task.form), or a model that follows instructions"
    )


def _not_finite(rows: Sequence[Mapping[str, Any]]) -> str | None:
    share = _mean(rows, "reward/not_finite")
    if not share:
        return None
    return f"a reward fails or is not finite and counts as 0 ({share:.0%} of the responses); the log names it"


def _share(rows: Sequence[Mapping[str, Any]], factors: Mapping[str, float]) -> float | None:
    """Average the first metric that the rows have, as a share. Returns None if they have none.

    Args:
        factors: metric of either engine -> factor that makes it a share.
    """
    for key, factor in factors.items():
        mean = _mean(rows, key)
        if mean is not None:
            return mean * factor
    return None


def _mean(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """Average a metric over the rows. Returns None if a row does not have it."""
    values = []
    for row in rows:
        value = _number(row, key)
        if value is None:
            return None
        values.append(value)
    return fmean(values)


def _number(row: Mapping[str, Any], key: str) -> float | None:
    value = row.get(key)
    return float(value) if isinstance(value, int | float) else None
