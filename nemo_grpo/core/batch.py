"""`TokenBatch`: a rollout step as aligned ``[B, T]`` tensors; `PreparedBatch`: the same with its advantages.

All token tensors are already shifted: column ``t`` of logprobs, masks and advantages belongs to one
predicted token.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import Any

from nemo_grpo.core.lazy import Tensor, torch
from nemo_grpo.core.statistics import zero_outside

_LOGPROB_FIELDS = (
    "next_token_logprobs",
    "prev_logprobs",
    "generation_logprobs",
    "reference_policy_logprobs",
    "unfiltered_logprobs",
    "entropies",
)
_TOKEN_FIELDS = ("token_mask", *_LOGPROB_FIELDS)
_ROW_FIELDS = ("sample_mask", "rewarded", "rewards", "group_ids", "response_ids", "scored")


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """Sequences of a rollout step, or any subset of its rows.

    Args:
        prev_logprobs: [B, T] float32 or float64, nats; the policy when the rollout was scored, no gradient.
        token_mask: [B, T]; True where a response token counts (prompt, padding and tool output are False).
        sample_mask: [B]; False removes the sequence from the loss and from every statistic of its tokens.
        rewards: [B]; the scalar reward of each sequence.
        group_ids: [B] integers; equal for the responses to one prompt.
        rewarded: [B] bool; True where the reward counts in its group's mean and deviation. Default:
            ``sample_mask``. Overlong filtering changes ``sample_mask`` alone.
        next_token_logprobs: [B, T], nats; the current policy, with gradient; the loss needs them.
        generation_logprobs: [B, T], nats; the sampler's own. Default: ``prev_logprobs``.
        reference_policy_logprobs: [B, T], nats; needed by a KL penalty and by ERPO.
        unfiltered_logprobs: [B, T], nats; the current policy without top-k and top-p, with gradient, where
            ``next_token_logprobs`` come from the filtered distribution; the KL penalty uses these.
        entropies: [B, T], nats; full-vocabulary entropy when the rollout was scored; needed by ERPO.
        response_ids: [B] integers that identify the step's responses in any row order (a hash of their
            tokens); variants that draw per token seed the draw with them. Default: the bits of prev_logprobs,
            which differ in the last digit between layouts.
        scored: [B] bool; False where the policy left a row out: its prev_logprobs are the sampler's own,
            and its entropies mean nothing. Default: all True.
        carried: `PreparedBatch.carried` of the previous step; empty before the first.
    """

    prev_logprobs: Tensor
    token_mask: Tensor
    sample_mask: Tensor
    rewards: Tensor
    group_ids: Tensor
    next_token_logprobs: Tensor = None  # type: ignore[assignment]  # `Objective.loss` asks for it
    generation_logprobs: Tensor = None  # type: ignore[assignment]  # filled below, so readers see a Tensor
    reference_policy_logprobs: Tensor | None = None
    unfiltered_logprobs: Tensor | None = None
    entropies: Tensor | None = None
    response_ids: Tensor | None = None
    scored: Tensor | None = None
    rewarded: Tensor | None = None
    carried: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # A frozen dataclass can set its own fields only through `object`.
        if self.generation_logprobs is None:
            object.__setattr__(self, "generation_logprobs", self.prev_logprobs)
        self._check_types()
        self._check_shapes()
        for name in ("token_mask", "sample_mask"):
            mask = getattr(self, name)
            if mask.dtype != torch.bool:
                require((mask == 0) | (mask == 1), mask, name, "a mask is 0 or 1; weights go into rewards")
                object.__setattr__(self, name, mask.bool())

    def _check_types(self) -> None:
        for name in ("prev_logprobs", "token_mask", "sample_mask", "rewards", "group_ids"):
            if getattr(self, name) is None:
                shape = "[B]" if name in _ROW_FIELDS else "[B, T]"
                raise TypeError(f"{name} is None; give a {shape} tensor, as TokenBatch's docstring says")
        for name, value in self._present(*_TOKEN_FIELDS, *_ROW_FIELDS).items():
            if not isinstance(value, torch.Tensor):
                raise TypeError(f"{name} is a {type(value).__name__}; give a tensor")
        dtype = self.prev_logprobs.dtype
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"prev_logprobs is {dtype}; use float32 or float64")
        for name, value in self._present(*_LOGPROB_FIELDS).items():
            if value.dtype != dtype:
                raise ValueError(f"{name} is {value.dtype} and prev_logprobs is {dtype}; use one of them")
        if self.group_ids.is_floating_point():
            raise ValueError(f"group_ids is {self.group_ids.dtype}; it must be an integer tensor")

    def _check_shapes(self) -> None:
        shape = tuple(self.prev_logprobs.shape)
        if len(shape) != 2:
            raise ValueError(f"prev_logprobs has shape {shape}; it must be [B, T]")
        for name, value in self._present(*_TOKEN_FIELDS, *_ROW_FIELDS).items():
            required_shape = shape[:1] if name in _ROW_FIELDS else shape
            if tuple(value.shape) != required_shape:
                raise ValueError(
                    f"{name} has shape {tuple(value.shape)}; it must be {list(required_shape)}, as "
                    "prev_logprobs"
                )
            if value.device != self.prev_logprobs.device:
                raise ValueError(
                    f"{name} is on {value.device}; prev_logprobs is on {self.prev_logprobs.device}"
                )

    def _present(self, *names: str) -> dict[str, Tensor]:
        """Return those of these fields that are not None."""
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def kl_logprobs(self) -> Tensor:
        """Current policy's logprobs for the KL penalty, [B, T], before any top-k and top-p filter."""
        # The reference policy is never filtered. A KL to it from a top-k distribution would not end at 0.
        if self.unfiltered_logprobs is not None:
            return self.unfiltered_logprobs
        return self.next_token_logprobs

    @cached_property
    def mask(self) -> Tensor:
        """[B, T] bool: tokens that count."""
        return self.token_mask & self.sample_mask[:, None]

    @property
    def in_groups(self) -> Tensor:
        """[B] bool: sequences whose rewards count."""
        return self.sample_mask if self.rewarded is None else self.rewarded

    @cached_property
    def counts(self) -> Tensor:
        """[B, T]: 1 for the tokens that count, else 0; of the logprobs' dtype."""
        return self.mask.to(self.prev_logprobs.dtype)

    @property
    def scored_mask(self) -> Tensor:
        """[B, T] bool: tokens that count, of the rows that the policy scored."""
        return self.mask if self.scored is None else self.mask & self.scored[:, None]

    def select(
        self, rows: Tensor | slice, *, next_token_logprobs: Tensor | None = None, length: int | None = None
    ) -> TokenBatch:
        """Select rows.

        Args:
            rows: indices, a bool mask or a slice of the B rows.
            next_token_logprobs: [rows, length], the current policy's; None: the batch's.
            length: number of columns to keep; None: all.
        Returns: a batch of these rows.
        """
        changes: dict[str, Any] = {name: x[rows] for name, x in self._present(*_ROW_FIELDS).items()}
        changes |= {name: x[rows, :length] for name, x in self._present(*_TOKEN_FIELDS).items()}
        if next_token_logprobs is not None:
            changes["next_token_logprobs"] = next_token_logprobs
        return replace(self, **changes)

    def to(self, device: torch.device | str) -> TokenBatch:
        """Return the batch on another device."""
        return on_device(self, device)

    def clean(self, names: tuple[str, ...] = _LOGPROB_FIELDS) -> TokenBatch:
        """Return the batch with 0 wherever a token or a sequence does not count.

        NaN, infinity or garbage there reaches neither a value nor a gradient.

        Args: names: [B, T] fields to clean; the others are clean already.
        """
        mask = self.mask
        rewards = torch.where(self.in_groups, self.rewards.to(self.prev_logprobs.dtype), 0.0)
        # A copy instead of `replace`, which would check all shapes again and drop the cached masks: this runs
        # for every microbatch.
        clean = copy.copy(self)
        attributes = vars(clean)
        for name, values in self._present(*names).items():
            attributes[name] = zero_outside(values, mask)
        attributes["token_mask"] = mask
        attributes["rewards"] = rewards
        return clean


def require(holds: Tensor, values: Tensor, name: str, rule: str) -> None:
    """Check a rule about every element of ``values``.

    Args:
        holds: bool, of the shape of ``values``.
        values: the tensor that the rule is about.
        name: its name in the message.
        rule: ends the sentence "NAME[INDEX] is VALUE; ...".
    Raises: ValueError: an element breaks the rule; the message names its index and value. On a GPU the check
            runs in a kernel, which stops the whole process instead and prints only the name and the rule.
    """
    # `holds.all()` in an if would make the CPU wait for the GPU in every loss call.
    if holds.device.type != "cpu":
        torch._assert_async(holds.all(), f"{name}: {rule}")
    elif not holds.all():
        first_index = tuple(torch.nonzero(~holds)[0].tolist())
        index_text = ", ".join(map(str, first_index))
        raise ValueError(f"{name}[{index_text}] is {values[first_index].item()}; {rule}")


def global_counts(batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Count a whole step: ``(global_valid_toks, global_valid_seqs)``, 0-d tensors."""
    return batch.mask.sum(), batch.sample_mask.sum()


@dataclass(frozen=True)
class PreparedBatch:
    """A prepared step, as `Objective.prepare` returns it: only sums over tokens remain.

    Attributes:
        batch: the tokens, cleaned under the mask.
        advantages: [B, T]; weights folded in where the equations allow it; exactly 0 where the mask is False.
        token_weights: [B, T] or None; step-level weights that the token terms need in addition.
        row_factors: [B] or None; `aggregation.group_mean_factors` of the whole step.
        group_sizes: [B] int64; sequences of the row's group that count, over the whole step.
        metrics: 0-d tensors, of the whole step; empty after `select`.
        carried: values for the next step's batch, such as moving statistics, which a checkpoint keeps;
            empty after `select`.
    """

    batch: TokenBatch
    advantages: Tensor
    group_sizes: Tensor
    token_weights: Tensor | None = None
    row_factors: Tensor | None = None
    metrics: dict[str, Tensor] = field(default_factory=dict)
    carried: dict[str, float] = field(default_factory=dict)

    def select(
        self, rows: Tensor | slice, *, next_token_logprobs: Tensor | None = None, length: int | None = None
    ) -> PreparedBatch:
        """Select a microbatch's or a rank's rows; the arguments are those of `TokenBatch.select`."""
        part = self.batch.select(rows, next_token_logprobs=next_token_logprobs, length=length)
        return PreparedBatch(
            # The step was cleaned when it was prepared; only the logprobs of this forward pass are new.
            batch=part.clean(("next_token_logprobs",)),
            advantages=self.advantages[rows, :length],
            group_sizes=self.group_sizes[rows],
            token_weights=None if self.token_weights is None else self.token_weights[rows, :length],
            row_factors=None if self.row_factors is None else self.row_factors[rows],
        )

    def folded(self) -> PreparedBatch:
        """Multiply token weights and row factors into the advantages.

        `Objective.folded` computes the same loss from the result if the policy term is proportional to w A
        with w >= 0, as the clipped one is: w min(rho A, clip(rho) A) = min(rho w A, clip(rho) w A).
        """
        advantages = self.advantages
        if self.token_weights is not None:
            advantages = advantages * self.token_weights
        if self.row_factors is not None:
            advantages = advantages * self.row_factors[:, None]
        return replace(self, advantages=advantages, token_weights=None, row_factors=None)

    def on_policy(self) -> PreparedBatch:
        """Replace the scored logprobs by the current ones, without gradient, so that the ratio is 1."""
        current = self.batch.next_token_logprobs.detach()
        return replace(self, batch=replace(self.batch, prev_logprobs=current))

    def to(self, device: torch.device | str) -> PreparedBatch:
        """Return the part on another device; the metrics stay where they are."""
        return on_device(self, device)


def on_device(part: Any, device: torch.device | str) -> Any:
    """Move all tensors of a dataclass to another device, those of nested dataclasses, too."""
    moved = dict[str, Any]()
    for dataclass_field in fields(part):
        value = getattr(part, dataclass_field.name)
        if isinstance(value, torch.Tensor):
            moved[dataclass_field.name] = value.to(device)
        elif is_dataclass(value):
            moved[dataclass_field.name] = on_device(value, device)
    return replace(part, **moved)


@dataclass(frozen=True)
class Sequences:
    """Prompts with responses as token ids, right-padded.

    Attributes:
        input_ids: [B, S] int64.
        lengths: [B] int64, tokens of prompt and response.
        prompt_lengths: [B] int64, at least 1 and less than ``lengths``; the tokens that follow need logprobs.
            Default: 1, so all but the first.
        prompt_ids: [B] integers; equal only for rows that begin with the same prompt. Default: all different.
    """

    input_ids: Tensor
    lengths: Tensor
    prompt_lengths: Tensor = None  # type: ignore[assignment]  # filled below, so readers see a Tensor
    prompt_ids: Tensor = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.prompt_lengths is None:
            object.__setattr__(self, "prompt_lengths", torch.ones_like(self.lengths))
        if self.prompt_ids is None:
            object.__setattr__(self, "prompt_ids", torch.arange(len(self.lengths)))

    def select(self, rows: Tensor) -> Sequences:
        """Return these rows, cut to their longest."""
        lengths = self.lengths[rows]
        return Sequences(
            self.input_ids[rows, : int(lengths.max())],
            lengths,
            self.prompt_lengths[rows],
            self.prompt_ids[rows],
        )
