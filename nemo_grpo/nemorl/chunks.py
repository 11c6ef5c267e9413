"""Estimator, policy and record of a training step that NeMo-RL's single controller sends in chunks.

A chunk holds some of the step's groups (async_rl.min_groups_for_streaming_train). The optimizer steps after
the last chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from nemo_grpo.nemorl.advantage import VariantEstimator
from nemo_grpo.nemorl.policy import VariantPolicy, has_gradient

if TYPE_CHECKING:
    from torch import Tensor

RECORDED = {
    "input_ids": "token_ids",
    "input_lengths": "input_lengths",
    "token_mask": "token_loss_mask",
    "sample_mask": "sample_loss_mask",
    "total_reward": "rewards",
    "advantages": "advantages",
    "generation_logprobs": "generation_logprobs",
    "prev_logprobs": "prev_logprobs",
}
"""Column of the data plane -> its name in ``train_data_stepN.jsonl``, which the other trainers write, too."""


@dataclass(kw_only=True)
class ChunkEstimator(VariantEstimator):
    """`VariantEstimator` for a step that comes in chunks of whole groups.

    Attributes:
        has_gradient: a chunk since the last `end_step` can move the policy.
        chunks: number of responses and metrics of each chunk since then.
    """

    has_gradient: bool = False
    chunks: list[tuple[int, dict[str, float]]] = field(default_factory=list)

    def compute_advantage(
        self, prompt_ids: Tensor, rewards: Tensor, mask: Tensor, *further: Any, **named: Any
    ) -> Tensor:
        """Compute a chunk's advantages, see `VariantEstimator.compute_advantage`."""
        if not self.is_scored:
            # NeMo-RL's other trainers give zeros then, the controller nothing.
            named.setdefault("logprobs_policy", torch.zeros_like(mask))
        # `VariantEstimator` counts a step per call, and here a step has several.
        step = self.step
        advantages = super().compute_advantage(prompt_ids, rewards, mask, *further, **named)
        self.step = step
        self.chunks.append((len(rewards), self.last_metrics))
        chunk = {"advantages": advantages, "sample_mask": mask.bool().any(1)}
        self.has_gradient |= has_gradient(chunk, self.objective)
        return advantages

    def end_step(self) -> dict[str, list[float]]:
        """End the step, and return its metrics as means over its responses."""
        means = {}
        if self.chunks:
            num_responses = [number for number, _ in self.chunks]
            _, first_metrics = self.chunks[0]
            for name in first_metrics:
                values = [metrics[name] for _, metrics in self.chunks]
                means[name] = [fmean(values, weights=num_responses)]
        self.chunks = []
        self.has_gradient = False
        self.step += 1
        return means


class StepRecord:
    """The responses of a step and what they were trained with, for ``train_data_stepN.jsonl``.

    Attributes:
        write: `log_batched_dict_as_jsonl` of NeMo-RL's logger.
        step: number of the recorded step.
    """

    def __init__(self, num_generations: int, *, scores: bool) -> None:
        """Set the columns.

        Args:
            num_generations: G, adjacent rows of a group.
            scores: True if NeMo-RL computes prev_logprobs.
        """
        self.num_generations = num_generations
        self.columns = [name for name in RECORDED if scores or name != "prev_logprobs"]
        self.chunks: list[dict[str, Tensor]] = []
        self.step = 1
        self.write: Callable[[dict[str, Any], str], None] | None = None

    def add(self, chunk: Mapping[str, Any]) -> None:
        """Keep a chunk's rows."""
        self.chunks.append({RECORDED[name]: chunk[name] for name in self.columns})

    def end_step(self) -> dict[str, list[float]]:
        """Write the rows, end the step, and return metrics that only NeMo-RL's other trainers log."""
        rows = {name: _stacked([chunk[name] for chunk in self.chunks]) for name in self.chunks[0]}
        if self.write is not None:
            file = f"train_data_step{self.step}.jsonl"
            self.write({name: column.tolist() for name, column in rows.items()}, file)
        self.chunks = []
        self.step += 1
        means = rows["rewards"].view(-1, self.num_generations).nanmean(1)
        # The other trainers count mixed groups like this. A group without any reward has the mean NaN, which
        # is not mixed.
        is_mixed = (means > 0) & (means < 1)
        return {
            "mean_gen_tokens_per_sample": [float(rows["token_loss_mask"].sum(1).float().mean())],
            "baseline_reward/pct_mixed": [100 * float(is_mixed.float().mean())],
        }


def _stacked(parts: list[Tensor]) -> Tensor:
    """Concatenate [B] or [B, S] of each chunk; S differs between chunks."""
    if parts[0].ndim == 1:
        return torch.cat(parts)
    width = max(part.shape[1] for part in parts)
    return torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in parts])


class StreamingPolicy(VariantPolicy):
    """NeMo-RL's policy for a step in chunks; it drops a step without gradient, but never the first step.

    Attributes:
        estimator: None for NeMo-RL's own loss.
        record: gets the rows of every chunk.
    """

    def __init__(
        self, *arguments: Any, estimator: ChunkEstimator | None, record: StepRecord, **named: Any
    ) -> None:
        super().__init__(*arguments, **named)
        self.estimator = estimator
        self.record = record

    def train_microbatches_from_meta(self, meta: Any, *arguments: Any, **named: Any) -> Any:
        """Train on a chunk as NeMo-RL does, and keep its rows."""
        self.record.add(self.read_from_dataplane(meta, select_fields=self.record.columns))
        return super().train_microbatches_from_meta(meta, *arguments, **named)

    def finish_train_step(self) -> dict[str, Any]:
        """Step the optimizer as NeMo-RL does, or drop the step, and add the estimator's metrics."""
        estimator = self.estimator
        drops_step = False
        if estimator is not None:
            may_learn = self.learns_always or estimator.has_gradient
            drops_step = self.skips_update(has_gradient=may_learn)
        if drops_step:
            self.abort_train_step()
            trained: dict[str, Any] = {"loss": 0.0, "grad_norm": 0.0, "all_mb_metrics": {}}
        else:
            trained = super().finish_train_step()
        if estimator is not None:
            trained["all_mb_metrics"] |= estimator.end_step()
        trained["all_mb_metrics"] |= self.record.end_step()
        return trained
