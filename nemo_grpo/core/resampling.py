"""Choice of a step's groups: DAPO's dynamic sampling and GPG's threshold, as pure functions on groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


def rewards_differ(rewards: Sequence[float]) -> bool:
    """Return True if a group's largest reward differs from its smallest. A reward of NaN does not count.

    A standard deviation would not do: rounding makes it differ from 0 for equal rewards.
    """
    finite = [reward for reward in rewards if not math.isnan(reward)]
    return len(finite) > 0 and max(finite) != min(finite)


def has_signal(rewards: Sequence[float], trains: Sequence[bool]) -> bool:
    """Return True if a group's rewards differ and at least one of its responses trains.

    Args:
        rewards: the task's rewards, before any length penalty: a difference in length alone is no signal.
            NaN where a reward function abstained.
        trains: False for a response that is left out of training, as a truncated one may be. Its reward
            still counts in the comparison.
    """
    has_response_that_trains = False
    for reward, response_trains in zip(rewards, trains, strict=True):
        if response_trains and math.isfinite(reward):
            has_response_that_trains = True
    return has_response_that_trains and rewards_differ(rewards)


@dataclass(frozen=True)
class Accumulation(Generic[T]):
    """Groups gathered so far for one step.

    Attributes:
        valid: groups with signal, in the order of the draws.
        invalid: the last draw's groups without signal.
        draws: number of draws so far.
    """

    valid: tuple[T, ...] = ()
    invalid: tuple[T, ...] = ()
    draws: int = 0

    def add(self, draw: Sequence[T], is_valid: Callable[[T], bool]) -> Accumulation[T]:
        """Return the accumulation after one more draw of prompts."""
        valid = tuple(group for group in draw if is_valid(group))
        # Earlier draws' groups without signal are dropped: the last draw alone can fill a step.
        invalid = tuple(group for group in draw if not is_valid(group))
        return Accumulation(self.valid + valid, invalid, self.draws + 1)

    def is_complete(self, num_groups: int, valid_fraction_threshold: float, max_draws: int) -> bool:
        """Return True once the share of valid groups is reached or ``max_draws`` draws have been made."""
        return len(self.valid) >= valid_fraction_threshold * num_groups or self.draws >= max_draws

    def take(self, num_groups: int) -> tuple[T, ...]:
        """Return valid groups, then invalid ones of the last draw, cut at ``num_groups``."""
        return (self.valid + self.invalid)[:num_groups]


def accumulate_groups(
    draw: Callable[[], Sequence[T]],
    is_valid: Callable[[T], bool],
    *,
    num_groups: int,
    valid_fraction_threshold: float,
    max_draws: int,
) -> Accumulation[T]:
    """Draw batches of prompts until enough groups carry signal.

    Implements GPG section 3 and Algorithm 1: while valid / B < beta_th keep the valid groups and draw again.
    DAPO's dynamic sampling is the threshold 1.0: every group of the step carries signal.

    Args:
        draw: returns the groups of one more batch of prompts.
        is_valid: True for a group with signal.
        num_groups: B, in groups.
        valid_fraction_threshold: beta_th, share of ``num_groups``.
        max_draws: maximum number of draws, including the first.
    Returns: the accumulation of at least one draw; its ``take(num_groups)`` is the step. After ``max_draws``
             draws it may hold groups without signal, but never fewer than ``num_groups`` if each draw brings
             that many.
    """
    gathered = Accumulation[T]().add(draw(), is_valid)
    while not gathered.is_complete(num_groups, valid_fraction_threshold, max_draws):
        gathered = gathered.add(draw(), is_valid)
    return gathered
