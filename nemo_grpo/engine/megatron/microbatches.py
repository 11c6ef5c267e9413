"""Microbatches: sequences computed together, limited in rows or, if packed, in tokens; and their results."""

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
        logprobs: [B, S - 1] float32, nats, at the sampling temperature; 0 in the padding and, where sequences
            are packed, in prompts.
        entropies: likewise, always at temperature 1; None: not computed.
    """

    logprobs: Tensor
    entropies: Tensor | None = None


@dataclass(frozen=True)
class UpdateResult:
    """One optimizer step.

    Attributes:
        metrics: token means over the batch.
        grad_norm: before clipping.
        lr: learning rate of this step.
        skipped: the loss or the gradient was not finite and nothing was changed.
        scores: of the weights before the step, with ``scoring``.
        computed: [B] bool; False for rows without a gradient, which were left out: ``scores`` are 0.
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
        rows: indices in the step.
        length: the microbatch's columns.
        outputs: logprobs, and entropies if any; none before the last pipeline stage.
    """

    rows: Tensor
    length: int
    outputs: list[Tensor] = field(default_factory=list)

    def keep(self, logprobs: Tensor, entropies: Tensor | None) -> None:
        """Hold results for later."""
        self.outputs = [logprobs] if entropies is None else [logprobs, entropies]


@dataclass
class Microbatch:
    """Rows of a step, and the number of columns that holds their longest sequence.

    Attributes:
        rows: indices in the step.
        length: columns.
        parts: its rows, split in their order.
        packed: its rows as one stream.
    """

    rows: Tensor
    length: int
    parts: list[Part]
    packed: PackedSequences | None = None


def plan_parts(num_tokens: Sequence[int], max_tokens: int) -> list[int]:
    """Return the sizes of `Part`s of consecutive rows: at most ``max_tokens`` tokens each, or a single row.

    Args:
        num_tokens: tokens with logits, per row.
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
    """Return (data-parallel rank, number of ranks), which decide the sequences of this rank."""
    return parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()


def by_gradient(has_gradient: Tensor, share: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Split rows into (rows to compute, rows to leave out).

    Args:
        has_gradient: [B] bool, on the host.
        share: (rank, number of ranks).
    """
    _, num_ranks = share
    # Every data-parallel rank joins the reduction of the gradients, so each needs a row to compute. With too
    # few of them none is left out.
    if has_gradient.sum() < num_ranks:
        has_gradient = torch.ones_like(has_gradient)
    return has_gradient.nonzero().flatten(), (~has_gradient).nonzero().flatten()


def plan_rows(lengths: Tensor, size: int, share: tuple[int, int] = (0, 1)) -> list[Tensor]:
    """Plan this rank's microbatches of ``size`` rows of similar length.

    Rows go round the ranks by length, so that each has about the same work.

    Args:
        share: (rank, number of ranks).
    """
    rank, num_ranks = share
    # Stable, so that rows of equal length come in the same order on every rank.
    from_longest = lengths.argsort(descending=True, stable=True)
    return list(from_longest[rank::num_ranks].split(size))


def plan_groups(group_ids: Tensor, share: tuple[int, int]) -> list[Tensor]:
    """List the rows of each group that this rank computes."""
    rank, num_ranks = share
    local_groups = group_ids.unique()[rank::num_ranks]
    return [torch.nonzero(group_ids == group_id).flatten() for group_id in local_groups]


class _Unit(NamedTuple):
    """Rows that stay together in one bin, and the tokens that they take there."""

    num_tokens: int
    rows: list[int]


def plan_bins(
    sequences: Sequences, capacity: int, share: tuple[int, int] = (0, 1), *, share_prompts: bool = True
) -> list[Tensor]:
    """Pack this rank's rows into bins of at most ``capacity`` tokens, by first fit decreasing.

    The indivisible unit is one sequence or, with ``share_prompts``, as many responses to one prompt as fit
    into a bin: their prompt then counts once. Ranks get equal numbers of rows, in the order of the prompts,
    so that few prompts are computed on two ranks.

    Args:
        capacity: at least the longest sequence.
    """
    rank, num_ranks = share
    by_prompt = sequences.prompt_ids.argsort(stable=True)
    local_rows = by_prompt.tensor_split(num_ranks)[rank].tolist()
    prompt_ids = sequences.prompt_ids.tolist()
    # Without shared prompts a prompt is a part of its sequence's own tokens.
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
