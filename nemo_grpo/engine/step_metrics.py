"""Metrics of a step for metrics.jsonl, its stopwatch, and the note beside the progress bar."""

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
    """Stopwatch of a step. `laps` has the seconds of each part of the step."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self.last = time.monotonic()

    def lap(self, name: str) -> None:
        """Store the seconds since the previous lap under a name."""
        now = time.monotonic()
        self.laps[name] = now - self.last
        self.last = now


def mean_scores(groups: list[Group], all_groups: list[Group]) -> dict[str, float]:
    """Average over a step's responses: reward components, failures, truncation and, if there are any, turns.

    Args:
        groups: Groups that the step trains on.
        all_groups: All groups that were sampled for the step, for the metrics ``rollout/all_*``.
    """
    responses = [scored.response for group in groups for scored in group.responses]
    means = reward_metrics(_scores(groups), _scores(all_groups))
    means["length/truncated"] = sum(response.truncated for response in responses) / len(responses)
    episodes = [asdict(response.episode) for response in responses if response.episode is not None]
    # A response without turns has no episode, and does not count in the means over turns.
    if episodes:
        for name in episodes[0]:
            means[f"episode/{name}"] = sum(episode[name] for episode in episodes) / len(episodes)
    return means


def sampled_metrics(step: Step) -> dict[str, float]:
    """Compute ``reward/*`` and ``length/*`` over all responses that were sampled for a step.

    Args:
        step: Tensors of all groups, also of those that dynamic sampling drops.
    """
    rewarded = ~step.rewards.isnan()
    mask = step.token_mask & step.sample_mask[:, None]
    metrics = objective.reward_metrics(step.rewards, rewarded, Groups.from_ids(step.group_ids))
    metrics |= objective.length_metrics(mask, step.sample_mask)
    return {name: float(value) for name, value in metrics.items()}


def signal_shares(groups: list[Group], *, drop_truncated: bool = False) -> dict[str, float]:
    """Compute the share of the sampled groups whose rewards differ.

    Args:
        groups: All groups that were sampled for the step.
        drop_truncated: See `Group.has_signal`.
    """
    num_with_signal = sum(group.has_signal(drop_truncated=drop_truncated) for group in groups)
    return {"rollout/with_signal": num_with_signal / len(groups)}


def _scores(groups: list[Group]) -> list[list[dict[str, float]]]:
    return [[scored.scores for scored in group.responses] for group in groups]


def mean_metrics(updates: list[UpdateResult]) -> dict[str, float]:
    """Average the metrics of a step's updates."""
    if not updates:
        return {}
    rows = [update.metrics | {"grad_norm": update.grad_norm, "lr": update.lr} for update in updates]
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}


def note(row: dict[str, Any]) -> str:
    """Write the numbers beside the progress bar.

    The most important ones come first, because a narrow terminal cuts the text off at its end.
    """
    formats = {
        **HELD_OUT,
        "reward/mean": "reward {:.2f}",
        "reward/accuracy": "right {:.0%}",
        "rollout/with_signal": "signal {:.0%}",
        "length/mean": "length {:.0f}",
        "length/truncated": "cut {:.0%}",
        "entropy/mean": "entropy {:.2f}",
        "tokens_per_second": "{:.0f} tokens/s",
    }
    numbers = [pattern.format(row[name]) for name, pattern in formats.items() if name in row]
    return "  ".join(numbers)
