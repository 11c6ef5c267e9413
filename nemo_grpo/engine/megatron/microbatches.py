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

    Attributes: logprobs: [B, S - 1] float32, nats, at the sampling temperature; 0 in the padding and, where
                    sequences are packed, in prompts.
                entropies: likewise, always at temperature 1; None: not computed.
    """

    logprobs: Tensor
    entropies: Tensor | None = None


@dataclass(frozen=True)
class UpdateResult:
    """One optimizer step.

    Attributes: metrics: token means over the batch.  grad_norm: before clipping.  lr: used in this step.
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

    Attributes: rows: indices in the step.  length: the microbatch's columns.
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

    Attributes: parts: its rows, split in their order.  packed: its rows as one stream.
    """

    rows: Tensor
    length: int
    parts: list[Part]
    packed: PackedSequences | None = None


def plan_parts(num_tokens: Sequence[int], most: int) -> list[int]:
    """Return the sizes of `Part`s of consecutive rows: at most ``most`` tokens each, or a single row.

    Args: num_tokens: tokens with logits, per row.
    """
    sizes, used = [0], 0
    for tokens in num_tokens:
        if sizes[-1] and used + tokens > most:
            sizes, used = [*sizes, 0], 0
        sizes[-1] += 1
        used += tokens
    return sizes


def own_share() -> tuple[int, int]:
    """Return (data-parallel rank, number of ranks), which decide the sequences of this rank."""
    return parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()


def by_gradient(has_gradient: Tensor, share: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Split rows into (rows to compute, rows to leave out).

    Every data-parallel rank needs a row to compute: with too few, none is left out.

    Args: has_gradient: [B] bool, on the host.  share: (rank, number of ranks).
    """
    _, num_ranks = share
    if has_gradient.sum() < num_ranks:
        has_gradient = torch.ones_like(has_gradient)
    return has_gradient.nonzero().flatten(), (~has_gradient).nonzero().flatten()


def plan_rows(lengths: Tensor, size: int, share: tuple[int, int] = (0, 1)) -> list[Tensor]:
    """Plan this rank's microbatches of ``size`` rows of similar length.

    Rows go round the ranks by length, so that each has about the same work.

    Args: share: (rank, number of ranks).
    """
    rank, num_ranks = share
    return list(lengths.argsort(descending=True, stable=True)[rank::num_ranks].split(size))


def plan_groups(group_ids: Tensor, share: tuple[int, int]) -> list[Tensor]:
    """List the rows of each group that this rank computes."""
    rank, num_ranks = share
    return [torch.nonzero(group_ids == g).flatten() for g in group_ids.unique()[rank::num_ranks]]


def plan_bins(
    sequences: Sequences, capacity: int, share: tuple[int, int] = (0, 1), *, share_prompts: bool = True
) -> list[Tensor]:
    """Pack this rank's rows into bins of at most ``capacity`` tokens, by first fit decreasing.

    The indivisible unit is one sequence or, with ``share_prompts``, as many responses to one prompt as fit
    into a bin: their prompt then counts once. Ranks get equal numbers of rows, in the order of the prompts,
    so that few prompts are computed on two ranks.

    Args: capacity: at least the longest sequence.
    """
    rank, num_ranks = share
    own = sequences.prompt_ids.argsort(stable=True).tensor_split(num_ranks)[rank]
    prompts = sequences.prompt_lengths.tolist() if share_prompts else [0] * len(sequences.lengths)
    costs = (sequences.lengths - 1 - torch.tensor(prompts)).tolist()
    units: list[tuple[int, list[int]]] = []
    prompt_ids, last = sequences.prompt_ids.tolist(), None
    for row in own.tolist():
        if prompts[row] + costs[row] > capacity:
            raise ValueError(f"a sequence of {prompts[row] + costs[row]} tokens is longer than {capacity=}")
        if share_prompts and prompt_ids[row] == last and units[-1][0] + costs[row] <= capacity:
            units[-1] = (units[-1][0] + costs[row], [*units[-1][1], row])
        else:
            units.append((prompts[row] + costs[row], [row]))
        last = prompt_ids[row]
    return [torch.tensor(rows) for rows in _first_fit_decreasing(units, capacity)]


def _first_fit_decreasing(units: Sequence[tuple[int, list[int]]], capacity: int) -> list[list[int]]:
    bins: list[tuple[int, list[int]]] = []
    for size, rows in sorted(units, key=lambda unit: -unit[0]):
        fitting = (i for i, (used, _) in enumerate(bins) if used + size <= capacity)
        place = next(fitting, None)
        if place is None:
            bins.append((size, rows))
        else:
            bins[place] = (bins[place][0] + size, bins[place][1] + rows)
    return [rows for _, rows in bins]
