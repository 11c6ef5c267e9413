"""Prompts as streams of tokens without padding."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

MAX_TOKENS = 8192
"""Prompt tokens read at a time, or those of one longer prompt; bounds the memory of their activations."""


@dataclass(frozen=True)
class PromptRun:
    """Prompts of one length, next to each other in a stream.

    Attributes:
        tokens: slice of the stream that holds the run.
        number: number of prompts.
        length: tokens in each prompt.
        rows: [r], rows of the cache that begin with these prompts.
        prompt_of_row: [r], number of each row's prompt within the run.
    """

    tokens: slice
    number: int
    length: int
    rows: Tensor
    prompt_of_row: Tensor


@dataclass(frozen=True)
class PromptStream:
    """Prompts one after the other without padding, shorter ones first.

    Attributes:
        prompts: [P], numbers of the prompts.
        ends: [P], index of each prompt's last token in the stream.
        tokens: [N], tokens of all prompts.
        positions: [N], position of each token in its prompt.
        prompt_of_token: [N], number of each token's prompt.
        runs: parts of the stream with prompts of equal length.
    """

    prompts: Tensor
    ends: Tensor
    tokens: Tensor
    positions: Tensor
    prompt_of_token: Tensor
    runs: list[PromptRun]


def prompt_streams(
    prompts: Sequence[list[int]], prompt_of_row: Tensor, device: torch.device
) -> Iterator[PromptStream]:
    """Yield streams that together hold each prompt once.

    Args:
        prompts: tokens of each prompt.
        prompt_of_row: [R], number of each row's prompt.
        device: device of the streams.
    """
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    place = torch.empty(len(order), dtype=torch.long)
    place[order] = torch.arange(len(order))
    place_of_row = place[prompt_of_row]
    for first, after in _passes([len(prompts[number]) for number in order]):
        numbers = order[first:after]
        lengths = [len(prompts[number]) for number in numbers]
        yield PromptStream(
            prompts=torch.tensor(numbers, device=device),
            ends=(torch.tensor(lengths).cumsum(0) - 1).to(device),
            tokens=torch.tensor([token for number in numbers for token in prompts[number]], device=device),
            positions=torch.cat([torch.arange(length) for length in lengths]).to(device),
            prompt_of_token=torch.tensor(numbers).repeat_interleave(torch.tensor(lengths)).to(device),
            runs=list(_runs(lengths, place_of_row - first, device)),
        )


def _passes(lengths: list[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of consecutive prompts that are read together; prompt number ``end`` is excluded."""
    first = 0
    total = 0
    for place, length in enumerate(lengths):
        if total and total + length > MAX_TOKENS:
            yield first, place
            first = place
            total = 0
        total += length
    yield first, len(lengths)


def _runs(lengths: list[int], place_of_row: Tensor, device: torch.device) -> Iterator[PromptRun]:
    """Yield the runs of a stream.

    Args:
        lengths: lengths of the stream's prompts, in order.
        place_of_row: [R], place of each row's prompt in the stream; rows of other streams have a place
            outside of it.
        device: device of the runs.
    """
    place = 0
    start = 0
    for length, equal_lengths in groupby(lengths):
        number = len(list(equal_lengths))
        is_in_run = (place <= place_of_row) & (place_of_row < place + number)
        rows = is_in_run.nonzero()[:, 0]
        end = start + number * length
        yield PromptRun(
            tokens=slice(start, end),
            number=number,
            length=length,
            rows=rows.to(device),
            prompt_of_row=(place_of_row[rows] - place).to(device),
        )
        place += number
        start = end
