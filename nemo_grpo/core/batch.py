"""`TokenBatch`: a rollout step as aligned ``[B, T]`` tensors; `PreparedBatch`: the same with its advantages.

All token tensors are already shifted: column ``t`` of logprobs, masks and advantages speaks of one predicted
token.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from nemo_grpo.core.lazy import torch


from nemo_grpo.core.masking import zeros_outside

_TOKEN_FIELDS = (
    "next_token_logprobs",
    "prev_logprobs",
    "generation_logprobs",
    "reference_policy_logprobs",
    "unfiltered_logprobs",
    "entropies",
)


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """Sequences of a rollout step, or any subset of its rows.

    Args:
        prev_logprobs: [B, T] float32 or float64, nats; the policy when the rollout was scored, no gradient.
        token_mask: [B, T]; True where a response token counts (prompt, padding and tool output are False).
        sample_mask: [B]; False removes the sequence from every statistic and from the loss.
        rewards: [B]; the scalar reward of each sequence.
        group_ids: [B] integers; equal for the responses to one prompt.
        next_token_logprobs: [B, T], nats; the current policy, with gradient. Default: ``prev_logprobs``,
            which is what it is before the first update of a step.
        generation_logprobs: [B, T], nats; the sampler's own. Default: ``prev_logprobs``.
        reference_policy_logprobs: [B, T], nats; needed by a KL penalty and by ERPO.
        unfiltered_logprobs: [B, T], nats; the current policy without top-k and top-p, with gradient, where
            ``next_token_logprobs`` are those of the filtered distribution; the KL penalty is taken of it.
        entropies: [B, T], nats; full-vocabulary entropy when the rollout was scored; needed by ERPO.
        response_ids: [B] integers that tell the step's responses apart wherever they stand (a hash of their
            tokens); variants that draw per token key the draw by them. Default: the bits of prev_logprobs,
            which differ in the last digit between layouts.
    Raises: ValueError: shapes, dtypes or devices that do not fit together.
    """

    prev_logprobs: Tensor
    token_mask: Tensor
    sample_mask: Tensor
    rewards: Tensor
    group_ids: Tensor
    next_token_logprobs: Tensor = None  # type: ignore[assignment]  # filled below, so readers see a Tensor
    generation_logprobs: Tensor = None  # type: ignore[assignment]
    reference_policy_logprobs: Tensor | None = None
    unfiltered_logprobs: Tensor | None = None
    entropies: Tensor | None = None
    response_ids: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("next_token_logprobs", "generation_logprobs"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, self.prev_logprobs)
        self._check_shapes()
        object.__setattr__(self, "token_mask", self.token_mask.bool())
        object.__setattr__(self, "sample_mask", self.sample_mask.bool())

    def _check_shapes(self) -> None:
        shape = tuple(self.prev_logprobs.shape)
        if len(shape) != 2:
            raise ValueError(f"prev_logprobs has shape {shape}; it must be [B, T]")
        expected: dict[str, tuple[int, ...]] = dict.fromkeys(("token_mask", *_TOKEN_FIELDS), shape)
        expected |= dict.fromkeys(("sample_mask", "rewards", "group_ids", "response_ids"), shape[:1])
        for name, want in expected.items():
            value = getattr(self, name)
            if value is None:
                continue
            if tuple(value.shape) != want:
                raise ValueError(
                    f"{name} has shape {tuple(value.shape)}; it must be {list(want)}, as prev_logprobs"
                )
            if value.device != self.prev_logprobs.device:
                raise ValueError(
                    f"{name} is on {value.device}; prev_logprobs is on {self.prev_logprobs.device}"
                )
            if name in _TOKEN_FIELDS and value.dtype not in (torch.float32, torch.float64):
                raise ValueError(f"{name} is {value.dtype}; use float32 or float64")
        if self.group_ids.is_floating_point():
            raise ValueError(f"group_ids is {self.group_ids.dtype}; it must be an integer tensor")

    @property
    def kl_logprobs(self) -> Tensor:
        """[B, T]: the current policy as the reference saw it, without top-k and top-p."""
        return self.next_token_logprobs if self.unfiltered_logprobs is None else self.unfiltered_logprobs

    @cached_property
    def mask(self) -> Tensor:
        """[B, T] bool: tokens that count."""
        return self.token_mask & self.sample_mask[:, None]

    @cached_property
    def counts(self) -> Tensor:
        """[B, T]: 1 for the tokens that count, else 0; of the logprobs' dtype."""
        return self.mask.to(self.prev_logprobs.dtype)

    def select(
        self, rows: Tensor | slice, *, next_token_logprobs: Tensor | None = None, length: int | None = None
    ) -> TokenBatch:
        """The given rows, cut to ``length`` columns, optionally with the current policy's logprobs."""
        changes: dict[str, Tensor] = {
            name: getattr(self, name)[rows] for name in ("sample_mask", "rewards", "group_ids")
        }
        if self.response_ids is not None:
            changes["response_ids"] = self.response_ids[rows]
        for name in ("token_mask", *_TOKEN_FIELDS):
            value = getattr(self, name)
            if value is not None:
                changes[name] = value[rows, :length]
        if next_token_logprobs is not None:
            changes["next_token_logprobs"] = next_token_logprobs
        return replace(self, **changes)

    def to(self, device: torch.device | str) -> TokenBatch:
        """The same batch on another device."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        moved: dict[str, Tensor] = {name: v.to(device) for name, v in values if v is not None}
        return replace(self, **moved)

    def clean(self) -> TokenBatch:
        """The same batch with 0 wherever a token or a sequence does not count.

        NaN, infinity or garbage there reaches neither a value nor a gradient.
        """
        mask = self.mask
        names = [name for name in _TOKEN_FIELDS if getattr(self, name) is not None]
        values = zeros_outside((getattr(self, name) for name in names), mask)
        rewards = torch.where(self.sample_mask, self.rewards.to(self.prev_logprobs.dtype), 0.0)
        clean = copy.copy(self)  # with its masks; shapes stay as they are and need no second check
        vars(clean).update(zip(names, values, strict=True), token_mask=mask, rewards=rewards)
        return clean


def global_counts(batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """``(global_valid_toks, global_valid_seqs)`` of a batch that holds the whole step; 0-d tensors."""
    return batch.mask.sum(), batch.sample_mask.sum()


@dataclass(frozen=True)
class PreparedBatch:
    """What `Objective.prepare` returns: all that spans sequences is decided, the rest is a sum over tokens.

    Attributes:
        batch: the tokens, cleaned under the mask.
        advantages: [B, T]; weights folded in where the equations allow it; exactly 0 where the mask is False.
        token_weights: [B, T] or None; step-level weights that the token terms need apart from the advantages.
        group_sizes: [B] int64; sequences of the row's group that count, over the whole step.
        metrics: 0-d tensors, of the whole step; empty after `select`.
    """

    batch: TokenBatch
    advantages: Tensor
    group_sizes: Tensor
    token_weights: Tensor | None = None
    metrics: dict[str, Tensor] = field(default_factory=dict)

    def select(
        self, rows: Tensor | slice, *, next_token_logprobs: Tensor | None = None, length: int | None = None
    ) -> PreparedBatch:
        """Any subset of rows (a microbatch, a rank's share), with the current policy's logprobs for them."""
        return PreparedBatch(
            batch=self.batch.select(rows, next_token_logprobs=next_token_logprobs, length=length).clean(),
            advantages=self.advantages[rows, :length],
            group_sizes=self.group_sizes[rows],
            token_weights=None if self.token_weights is None else self.token_weights[rows, :length],
        )

    def on_policy(self) -> PreparedBatch:
        """The same rows where the scoring policy is the current one: equal logprobs, without gradient."""
        current = self.batch.next_token_logprobs.detach()
        return replace(self, batch=replace(self.batch, prev_logprobs=current))

    def to(self, device: torch.device | str) -> PreparedBatch:
        """The same part of the step on another device; the metrics stay where they are."""
        weights = self.token_weights
        return replace(
            self,
            batch=self.batch.to(device),
            advantages=self.advantages.to(device),
            group_sizes=self.group_sizes.to(device),
            token_weights=None if weights is None else weights.to(device),
        )
