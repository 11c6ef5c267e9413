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
TRUNCATED = ("length/truncated", "train/truncation_rate")
ALL_WRONG = {"rollout/all_wrong": 1.0, "baseline_reward/pct_0": 0.01}
ALL_RIGHT = {"rollout/all_right": 1.0, "baseline_reward/pct_1": 0.01}
"""Metric of either engine -> factor that makes it a share."""
LENGTH_KEYS = "policy.generation.max_new_tokens, and policy.max_total_sequence_length with it"
ZERO = 1e-12


def findings(
    rows: Sequence[Mapping[str, Any]],
    weights: Mapping[str, float] | None = None,
) -> list[str]:
    """List reasons why a run does not learn, with numbers and remedies.

    Args:    rows: metrics of training steps in order, as in metrics.jsonl.
             weights: the recipe's ``nemo_grpo.rewards``; what has no weight is no obstacle. None: unknown.
    Returns: nothing for a run that learns, or without steps.
    """
    rows = [row for row in rows if _number(row, SIGNAL) is not None][-NUM_STEPS:]
    if not rows:
        return []
    when = f"steps {rows[0]['step']} to {rows[-1]['step']}" if len(rows) > 1 else f"step {rows[0]['step']}"
    judges_answers = weights is None or any(w and not is_reference(name) for name, w in weights.items())
    asks_for_form = weights is None or any(w and name.startswith("format") for name, w in weights.items())
    found = (
        _no_signal(rows, judges_answers=judges_answers),
        _truncated(rows),
        _format(rows) if asks_for_form else None,
        _not_finite(rows),
    )
    return [f"{when}: {sentence}" for sentence in found if sentence]


class Watch:
    """Follows a run; returns each finding when it begins to hold, and again every `AGAIN_AFTER` steps."""

    def __init__(self, max_num_steps: int, weights: Mapping[str, float] | None = None) -> None:
        """Args: weights: see `findings`."""
        self.weights = weights
        self.rows: deque[Mapping[str, Any]] = deque(maxlen=max(1, min(NUM_STEPS, max_num_steps)))
        self.told: dict[str, int] = {}

    def __call__(self, row: Mapping[str, Any]) -> list[str]:
        """Return findings to log after this step."""
        self.rows.append(row)
        if len(self.rows) < (self.rows.maxlen or 0):
            return []
        found = {_subject(sentence): sentence for sentence in findings(self.rows, weights=self.weights)}
        step = int(row["step"])
        self.told = {subject: when for subject, when in self.told.items() if subject in found}
        due = [subject for subject in found if step - self.told.get(subject, -AGAIN_AFTER) >= AGAIN_AFTER]
        self.told |= dict.fromkeys(due, step)
        return [found[subject] for subject in due]


def _subject(sentence: str) -> str:
    """Cut steps and numbers from a finding."""
    return sentence.partition(": ")[2].partition(" (")[0]


def _no_signal(rows: Sequence[Mapping[str, Any]], *, judges_answers: bool) -> str | None:
    """Find groups without signal.  Args: judges_answers: a component of the task has a weight."""
    if not all(row[SIGNAL] <= ZERO for row in rows):
        return None
    wrong = _share(rows, ALL_WRONG) if judges_answers else None
    right = _share(rows, ALL_RIGHT) if judges_answers else None
    reward = _mean(rows, "reward/mean")
    if wrong is not None and wrong >= 0.5:
        advice = (
            "easier problems, a start that solves some, a larger grpo.num_generations_per_prompt; look at "
            "samples.jsonl for answers in a form that the task does not read"
        )
    elif right is not None and right >= 0.5:
        advice = "harder problems: the policy solves these"
    else:
        advice = "another reward: this one does not tell the responses apart (nemo_grpo.rewards)"
    shares = [
        f"{share:.0%} of the groups all {word}"
        for share, word in ((wrong, "wrong"), (right, "right"))
        if share
    ]
    numbers = ", ".join([*shares, *([f"mean reward {reward:.3g}"] if reward is not None else [])])
    return f"in no group do two rewards differ, so nothing is learnt ({numbers}); try {advice}"


def _truncated(rows: Sequence[Mapping[str, Any]]) -> str | None:
    share = next((mean for key in TRUNCATED if (mean := _mean(rows, key)) is not None), None)
    if share is None or share < NEARLY_ALL:
        return None
    length = _mean(rows, "length/mean")
    numbers = (
        f"{share:.0%} of them, mean length {length:.0f}" if length is not None else f"{share:.0%} of them"
    )
    return f"nearly all responses are cut off before they end ({numbers}); try more {LENGTH_KEYS}"


def _format(rows: Sequence[Mapping[str, Any]]) -> str | None:
    met, right = _mean(rows, "reward/format"), _mean(rows, "reward/accuracy")
    if met is None or met > ZERO or (right is not None and right > ZERO):  # right answers were read
        return None
    numbers = "format 0" if right is None else f"format 0, accuracy {right:.2g}"
    return (
        f"no response has the form that the task reads ({numbers}); try a prompt that asks for it "
        "(nemo_grpo.prompt), another form (nemo_grpo.task.form), or a model that follows instructions"
    )


def _not_finite(rows: Sequence[Mapping[str, Any]]) -> str | None:
    share = _mean(rows, "reward/not_finite")
    if not share:
        return None
    return f"a reward fails or is not finite and counts as 0 ({share:.0%} of the responses); the log names it"


def _share(rows: Sequence[Mapping[str, Any]], names: Mapping[str, float]) -> float | None:
    return next((mean * unit for key, unit in names.items() if (mean := _mean(rows, key)) is not None), None)


def _mean(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """Average over the rows; None if one lacks it."""
    values = [_number(row, key) for row in rows]
    return None if None in values else fmean(value for value in values if value is not None)


def _number(row: Mapping[str, Any], key: str) -> float | None:
    value = row.get(key)
    return float(value) if isinstance(value, int | float) else None
