"""Random numbers that belong to a token, not to its place in a tensor.

A draw that depended on row order or padding would make the loss depend on them. Here a token's number is a
hash of the step's seed, its response (`response_ids`, or the scored logprobs of all its tokens) and its
position in the response, so any permutation, padding or split of the batch gives every token the same number.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable

from nemo_grpo.core.batch import TokenBatch
from nemo_grpo.core.lazy import Tensor, torch

# splitmix64 (Steele, Lea, Flood 2014); constants written as signed 64-bit integers, arithmetic wraps.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def _logical_shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift int64 as if it were unsigned; torch's own shift fills with the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """Hash each int64 by one round of splitmix64."""
    x = x + _GOLDEN
    x = (x ^ _logical_shift_right(x, 30)) * _MIX_1
    x = (x ^ _logical_shift_right(x, 27)) * _MIX_2
    return x ^ _logical_shift_right(x, 31)


def step_seed(seed: int, number: int) -> int:
    """Derive the seed of one step's random draws. Both engines use it, so a loss draws the same on both.

    Args:
        seed: seed of the run.
        number: any number that differs between the steps: a loss passes the step's, counted from 0, and
            rollouts pass that of the step's first problem.
    """
    # A prime beyond any usual number of steps, so that runs of neighbouring seeds share no draws.
    return seed * 1_000_003 + number


def response_ids(responses: Iterable[tuple[list[int], list[int]]]) -> Tensor:
    """Make ids that distinguish a step's responses and are the same on every engine.

    Args:    responses: (prompt tokens, response tokens) of each response.
    Returns: [B] int64. An id is a hash of the tokens and of the number of identical responses before this
        one, so that identical responses get different ids.
    """
    num_identical: Counter[str] = Counter()
    ids = []
    for response in responses:
        tokens = repr(response)
        # Python's own hash() of a string differs between processes.
        digest = hashlib.sha256(f"{tokens} {num_identical[tokens]}".encode()).digest()
        ids.append(int.from_bytes(digest[:8], "big", signed=True))
        num_identical[tokens] += 1
    return torch.tensor(ids)


def response_positions(mask: Tensor) -> Tensor:
    """Number the counting tokens of each response from 1: [B, T] int64, 0 where mask is False."""
    return torch.where(mask, mask.cumsum(1), 0)


def token_uniforms(batch: TokenBatch, seed: int) -> Tensor:
    """Draw [B, T] float64, uniform in [0, 1): one number per token, independent of its row and column."""
    positions = response_positions(batch.mask)
    if batch.response_ids is not None:
        response = batch.response_ids[:, None]
    else:
        bits = batch.prev_logprobs.double().view(torch.int64)
        token_hashes = torch.where(batch.mask, _mix(bits ^ _mix(positions)), 0)
        # Integer sums wrap and commute, so padding and the order of additions leave no trace.
        response = token_hashes.sum(1, keepdim=True)
    x = _mix(_mix(response + seed) ^ _mix(positions))
    # A float64 holds 53 bits: the upper 53 of 64 are exact, and the result stays below 1.
    return _logical_shift_right(x, 11).double() * 2.0**-53
