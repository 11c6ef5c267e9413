"""Rows of metrics.jsonl and samples.jsonl, and the note of the progress bar."""

import time
from dataclasses import asdict
from typing import Any

from nemo_grpo.core import objective
from nemo_grpo.core.statistics import Groups
from nemo_grpo.engine.megatron.policy import UpdateResult
from nemo_grpo.report.runs import HELD_OUT
from nemo_grpo.run.groups import Group, Step
from nemo_grpo.tasks.scoring import reward_metrics


class Clock:
    """Stopwatch: seconds between laps."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self.last = time.monotonic()

    def lap(self, name: str) -> None:
        """Note the seconds since the last lap."""
        now = time.monotonic()
        self.laps[name], self.last = now - self.last, now


def mean_scores(groups: list[Group], drawn: list[Group]) -> dict[str, float]:
    """Average over the step's responses: components, failures, truncation, and turns if any.

    Args: drawn: all groups drawn for the step, of which ``rollout/all_*`` are shares.
    """
    responses = [one for group in groups for one in group.responses]
    means = reward_metrics(_scores(groups), _scores(drawn))
    means["length/truncated"] = sum(one.response.truncated for one in responses) / len(responses)
    episodes = [asdict(one.response.episode) for one in responses if one.response.episode is not None]
    counts = episodes[0] if episodes else ()
    return means | {f"episode/{name}": sum(e[name] for e in episodes) / len(episodes) for name in counts}


def drawn_metrics(drawn: Step) -> dict[str, float]:
    """Compute the ``reward/*`` and ``length/*`` of `step_metrics` for all responses drawn for a step."""
    rewarded = ~drawn.rewards.isnan()
    mask = drawn.token_mask & drawn.sample_mask[:, None]
    metrics = objective.reward_metrics(drawn.rewards, rewarded, Groups.from_ids(drawn.group_ids))
    metrics |= objective.length_metrics(mask, drawn.sample_mask)
    return {name: float(value) for name, value in metrics.items()}


def signal_shares(drawn: list[Group], *, drop_truncated: bool = False) -> dict[str, float]:
    """Compute the share of the drawn groups whose rewards differ.

    Args: drop_truncated: see `Group.has_signal`.
    """
    with_signal = sum(group.has_signal(drop_truncated=drop_truncated) for group in drawn) / len(drawn)
    return {"rollout/with_signal": with_signal}


def _scores(groups: list[Group]) -> list[list[dict[str, float]]]:
    return [[one.scores for one in group.responses] for group in groups]


def mean_metrics(updates: list[UpdateResult]) -> dict[str, float]:
    """Average over the step's updates."""
    if not updates:
        return {}
    rows = [u.metrics | {"grad_norm": u.grad_norm, "lr": u.lr} for u in updates]
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}


def note(row: dict[str, Any]) -> str:
    """Write the progress bar's numbers, most important first: a narrow terminal cuts the others."""
    shown = {
        **HELD_OUT,
        "reward/mean": "reward {:.2f}",
        "reward/accuracy": "right {:.0%}",
        "rollout/with_signal": "signal {:.0%}",
        "length/mean": "length {:.0f}",
        "length/truncated": "cut {:.0%}",
        "entropy/mean": "entropy {:.2f}",
        "tokens_per_second": "{:.0f} tokens/s",
    }
    return "  ".join(text.format(row[name]) for name, text in shown.items() if name in row)
