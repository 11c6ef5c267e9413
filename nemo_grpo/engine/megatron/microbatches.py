"""Microbatches: which rows of a step are computed together, and the results of the passes over them.

The size of a microbatch is a number of rows or, if sequences are packed, a number of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from megatron.core import parallel_state
from torch import Tensor

from nemo_grpo.core.batch import Sequences
from nemo_grpo.engine.megatron.packing import PackedSequences


class Scores(NamedTuple):
    """The policy's scores of a step's tokens.

    Attributes:
        logprobs: [B, S - 1] float32, nats, at the sampling temperature. They are 0 in the padding and, if
            sequences are packed, in the prompts.
        entropies: Like ``logprobs``, but at temperature 1. None if they were not computed.
    """

    logprobs: Tensor
    entropies: Tensor | None = None


@dataclass(frozen=True)
class UpdateResult:
    """Result of one optimizer step.

    Attributes:
        metrics: Metrics of the loss, over the whole batch.
        grad_norm: Norm of the gradient before clipping.
        lr: Learning rate of this step.
        skipped: True if the loss or the gradient was not finite, so that no weight was changed.
        scores: Scores by the weights before the step, if the update was asked for them (``scoring``).
        computed: [B] bool, False for rows that were left out because they have no gradient. Their ``scores``
            are 0.
    """

    metrics: dict[str, float]
    grad_norm: float
    lr: float
    skipped: bool = False
    scores: Scores | None = None
    computed: Tensor | None = field(default=None, compare=False)


@dataclass
class Part:
    """Rows of a microbatch whose logits and loss are computed at once.

    Attributes:
        rows: Indices of the rows in the step.
        length: Number of columns of the microbatch.
        outputs: Logprobs, and entropies if they are computed. Empty except on the last pipeline stage.
    """

    rows: Tensor
    length: int
    outputs: list[Tensor] = field(default_factory=list)

    def keep(self, logprobs: Tensor, entropies: Tensor | None) -> None:
        """Store the part's results until all microbatches are finished."""
        self.outputs = [logprobs] if entropies is None else [logprobs, entropies]


@dataclass
class Microbatch:
    """Rows of a step that go through the model together.

    Attributes:
        rows: Indices of the rows in the step.
        length: Number of columns, that of the longest sequence.
        parts: The rows, split into consecutive parts.
        packed: The rows as one stream, if sequences are packed.
    """

    rows: Tensor
    length: int
    parts: list[Part]
    packed: PackedSequences | None = None


def plan_parts(num_tokens: Sequence[int], max_tokens: int) -> list[int]:
    """Split consecutive rows into `Part`s, and return the number of rows in each part.

    Args:
        num_tokens: Number of tokens with logits, for each row.
        max_tokens: Largest number of such tokens in a part. Only a part of a single row may have more.
    """
    sizes = [0]
    tokens_in_part = 0
    for num_row_tokens in num_tokens:
        if sizes[-1] > 0 and tokens_in_part + num_row_tokens > max_tokens:
            sizes.append(0)
            tokens_in_part = 0
        sizes[-1] += 1
        tokens_in_part += num_row_tokens
    return sizes


def data_parallel_share() -> tuple[int, int]:
    """Return this data-parallel rank and the number of such ranks, by which rows are divided."""
    return parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()


def by_gradient(has_gradient: Tensor, share: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Split the rows of a step into rows to compute and rows without a gradient, which are left out.

    Args:
        has_gradient: [B] bool, on the host.
        share: (rank, number of ranks).

    Returns:
        (indices of the rows to compute, indices of the rows to leave out).
    """
    _, num_ranks = share
    # Every data-parallel rank joins the reduction of the gradients, so each needs a row to compute. If fewer
    # rows than ranks have a gradient, all rows are computed.
    if has_gradient.sum() < num_ranks:
        has_gradient = torch.ones_like(has_gradient)
    return has_gradient.nonzero().flatten(), (~has_gradient).nonzero().flatten()


def plan_rows(lengths: Tensor, size: int, share: tuple[int, int] = (0, 1)) -> list[Tensor]:
    """Plan this rank's microbatches of ``size`` rows of similar length.

    The rows are sorted by length and dealt to the ranks in turn, so that all ranks have about the same work.

    Args:
        lengths: [B], length of each row.
        size: Number of rows of a microbatch.
        share: (rank, number of ranks).
    """
    rank, num_ranks = share
    # The sort is stable, so that all ranks have rows of equal length in the same order.
    from_longest = lengths.argsort(descending=True, stable=True)
    return list(from_longest[rank::num_ranks].split(size))


def plan_groups(group_ids: Tensor, share: tuple[int, int]) -> list[Tensor]:
    """Plan one microbatch for each group of this rank, and list the rows of each."""
    rank, num_ranks = share
    local_groups = group_ids.unique()[rank::num_ranks]
    return [torch.nonzero(group_ids == group_id).flatten() for group_id in local_groups]


class _Unit(NamedTuple):
    """Rows that must be in the same bin, and the number of tokens that they take there."""

    num_tokens: int
    rows: list[int]


def plan_bins(
    sequences: Sequences, capacity: int, share: tuple[int, int] = (0, 1), *, share_prompts: bool = True
) -> list[Tensor]:
    """Pack this rank's rows into bins of at most ``capacity`` tokens, by first fit decreasing.

    A unit that stays together is one sequence or, with ``share_prompts``, as many responses to one prompt as
    fit into a bin; their prompt then counts once. Rows are sorted by prompt and split evenly over the ranks,
    so that few prompts are computed on two ranks.

    Args:
        sequences: All rows of the step that are computed.
        capacity: Largest number of tokens in a bin, at least that of the longest sequence.
        share: (rank, number of ranks).
        share_prompts: True if responses share the tokens of their prompt.

    Returns:
        The rows of each bin.
    """
    rank, num_ranks = share
    by_prompt = sequences.prompt_ids.argsort(stable=True)
    local_rows = by_prompt.tensor_split(num_ranks)[rank].tolist()
    prompt_ids = sequences.prompt_ids.tolist()
    # Without shared prompts the prompt counts among the row's own tokens.
    prompt_tokens = sequences.prompt_lengths.tolist() if share_prompts else [0] * len(sequences.lengths)
    # The last token of a sequence predicts nothing and is not computed.
    row_tokens = (sequences.lengths - 1 - torch.tensor(prompt_tokens)).tolist()

    units: list[_Unit] = []
    prompt_of_unit = None
    for row in local_rows:
        num_tokens = prompt_tokens[row] + row_tokens[row]
        if num_tokens > capacity:
            raise ValueError(f"a sequence of {num_tokens} tokens is longer than {capacity=}")
        has_same_prompt = share_prompts and prompt_ids[row] == prompt_of_unit
        if has_same_prompt and units[-1].num_tokens + row_tokens[row] <= capacity:
            units[-1] = _Unit(units[-1].num_tokens + row_tokens[row], [*units[-1].rows, row])
        else:
            units.append(_Unit(num_tokens, [row]))
        prompt_of_unit = prompt_ids[row]
    return [torch.tensor(rows) for rows in _first_fit_decreasing(units, capacity)]


def _first_fit_decreasing(units: Sequence[_Unit], capacity: int) -> list[list[int]]:
    """Put each unit, the largest first, into the first bin with room for it."""
    bins: list[_Unit] = []
    for unit in sorted(units, key=lambda unit: -unit.num_tokens):
        for place, filled in enumerate(bins):
            if filled.num_tokens + unit.num_tokens <= capacity:
                bins[place] = _Unit(filled.num_tokens + unit.num_tokens, filled.rows + unit.rows)
                break
        else:
            bins.append(unit)
    return [filled.rows for filled in bins]
