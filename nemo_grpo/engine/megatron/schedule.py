"""Passes over microbatches by megatron-core's schedule: from token ids to logprobs, loss and gradients."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from torch.nn import functional

from nemo_grpo.core.logprobs import logprobs_and_entropy, next_token_logprobs
from nemo_grpo.engine.megatron import output_layer, parallel
from nemo_grpo.engine.megatron.microbatches import Microbatch, Part
from nemo_grpo.engine.megatron.output_layer import TokenScores, loss_in_parts
from nemo_grpo.engine.megatron.packing import PackedSequences

Loss = Callable[[Part, Tensor, Tensor | None], Tensor]
"""Function that computes a part's loss, 0-d, from its rows, logprobs [B, T], and entropies [B, T] or None.

It is called on the last pipeline stage only.
"""


class _Tokens(Protocol):
    """Tokens of a microbatch whose logits this rank computes, row after row.

    Attributes:
        targets: [N] int64, the tokens that these logits predict.
    """

    @property
    def targets(self) -> Tensor: ...

    def first_tokens(self, rows: list[int]) -> list[int]:
        """Return the number of the first token of each row. For the row after the last one it is N."""
        ...

    def to_rows(self, x: Tensor, first_row: int, num_rows: int, first_token: int) -> Tensor:
        """Gather values of tokens from all context-parallel ranks, and lay them out in rows.

        Args:
            x: [n], a value for each token of consecutive rows on this rank.
            first_row: Number of the first of these rows.
            num_rows: Number of rows.
            first_token: Number of the first token.

        Returns:
            [num_rows, T].
        """
        ...


@dataclass(frozen=True)
class _PaddedTokens:
    """Tokens of rows that are padded to one length.

    Attributes:
        targets: [N] int64, the predicted tokens.
        num_columns: Number of tokens of each row on this context-parallel rank.
        length: Number of columns of the microbatch. The first column is not predicted.
    """

    targets: Tensor
    num_columns: int
    length: int

    def first_tokens(self, rows: list[int]) -> list[int]:
        return [row * self.num_columns for row in rows]

    def to_rows(self, x: Tensor, first_row: int, num_rows: int, first_token: int) -> Tensor:
        whole = parallel.gather_sequence(x.view(num_rows, -1), 1, replicated=True)
        return whole[:, : self.length - 1]


@dataclass(frozen=True)
class _PackedTokens:
    """Tokens of a stream of packed sequences.

    Attributes:
        packed: The stream, with the row and column of each predicted token.
        length: Number of columns of the microbatch. The first column is not predicted.
    """

    packed: PackedSequences
    length: int

    @property
    def targets(self) -> Tensor:
        return self.packed.targets

    def first_tokens(self, rows: list[int]) -> list[int]:
        # A single part has all tokens. Without a search the host does not wait for a GPU.
        if len(rows) == 2:
            return [0, len(self.packed.rows)]
        return torch.searchsorted(self.packed.rows, self.packed.rows.new_tensor(rows)).tolist()

    def to_rows(self, x: Tensor, first_row: int, num_rows: int, first_token: int) -> Tensor:
        tokens = slice(first_token, first_token + len(x))
        places = (self.packed.rows[tokens] - first_row, self.packed.columns[tokens])
        whole = x.new_zeros(num_rows, self.length - 1).index_put(places, x)
        # Each rank has some tokens of a row, and 0 in the places of the other tokens, so a sum joins them.
        return parallel.sum_over_context_parallel(whole)


@dataclass(frozen=True)
class Pass:
    """Settings of a pass over microbatches.

    Attributes:
        temperature: Divisor of the logits for the logprobs.
        with_entropies: True to pass the tokens' entropies to the loss, at temperature 1 and without gradient.
        forward_only: True to compute no gradients.
        multiple: Divisor of the length of padded rows.
        vocab_size: Size of the vocabulary without padding.
        max_tokens: Largest number of tokens whose logits are in memory at a time.
    """

    temperature: float
    with_entropies: bool
    forward_only: bool
    multiple: int
    vocab_size: int
    max_tokens: int

    def run(self, model: torch.nn.Module, input_ids: Tensor, plan: Sequence[Microbatch], loss: Loss) -> None:
        """Run the schedule. It adds the gradients to those of the model's parameters.

        Args:
            model: Model that `optimizer.with_optimizer` has wrapped.
            input_ids: [B, S], all rows of the step. Packed microbatches have token ids of their own.
            plan: Microbatches of this rank, at least one.
            loss: Function that computes the loss of a part of a microbatch.
        """

        def forward_step(microbatches: Iterator[Microbatch], model: Any) -> tuple[Tensor, Any]:
            microbatch = next(microbatches)
            if microbatch.packed is None:
                output, tokens = self._padded(model, input_ids, microbatch)
            else:
                output, tokens = self._packed(model, microbatch, microbatch.packed)

            # megatron-core calls this function on the last pipeline stage only. On the others it sends
            # `output` to the next stage.
            def loss_of_microbatch(hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
                weight = model.module.output_weight
                parts = list(_parts(microbatch, tokens, loss))
                score = partial(self._score_tokens, tokens.targets)
                total = loss_in_parts(hidden.flatten(0, 1), weight, parts, score, self.max_tokens)
                return total, {}

            return output, loss_of_microbatch

        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(plan),
            model=[model],
            num_microbatches=len(plan),
            # The two sizes are required, but with variable_seq_lengths the stages send each other the shapes.
            seq_length=self._padded_length(max(microbatch.length for microbatch in plan)),
            micro_batch_size=max(len(microbatch.rows) for microbatch in plan),
            forward_only=self.forward_only,
        )

    def _padded_length(self, length: int) -> int:
        """Round the number of predicted columns up to the next multiple."""
        num_predicted = length - 1
        return num_predicted + -num_predicted % self.multiple

    def _padded(
        self, model: torch.nn.Module, input_ids: Tensor, microbatch: Microbatch
    ) -> tuple[Tensor, _Tokens]:
        """Run the model on rows that are padded to one length.

        Returns:
            (the model's output, the tokens that have logits).
        """
        ids = input_ids[microbatch.rows, : microbatch.length]
        # The rows have one column more than the model computes, because the last column is only predicted.
        ids = functional.pad(ids, (0, self._padded_length(microbatch.length) + 1 - microbatch.length))
        columns = parallel.zigzag(ids.shape[1] - 1, ids.device)
        targets = ids[:, 1:][:, columns].flatten()
        output = model(ids[:, :-1][:, columns], position_ids=None, attention_mask=None)
        return output, _PaddedTokens(targets, len(columns), microbatch.length)

    def _packed(
        self, model: torch.nn.Module, microbatch: Microbatch, packed: PackedSequences
    ) -> tuple[Tensor, _Tokens]:
        """Run the model on a stream of packed sequences.

        Returns:
            (the model's output, the tokens that have logits).
        """
        local_ids = packed.input_ids[:, packed.local_places]
        output = model(local_ids, position_ids=None, attention_mask=None, packed_seq_params=packed)
        return output, _PackedTokens(packed, microbatch.length)

    def _score_tokens(self, targets: Tensor, logits: Tensor, where: slice) -> TokenScores:
        """Compute logprobs and entropies of some tokens.

        Args:
            targets: [N], predicted tokens of the whole microbatch.
            logits: [n, V], logits of the tokens at ``where``. Under tensor parallelism V is this rank's part
                of the vocabulary.
            where: Place of these tokens in the microbatch.
        """
        targets = targets[where]
        vocabulary: dict[str, Any] = {
            "group": parallel_state.get_tensor_model_parallel_group(),
            "vocab_size": self.vocab_size,
        }
        # At temperature 1 a single softmax gives both.
        if self.with_entropies and self.temperature == 1:
            logprobs, entropies = logprobs_and_entropy(logits, targets, **vocabulary)
            return logprobs, entropies.detach()
        logprobs = next_token_logprobs(logits, targets, temperature=self.temperature, **vocabulary)
        if not self.with_entropies:
            return logprobs, None
        with torch.no_grad():
            _, entropies = logprobs_and_entropy(logits, targets, **vocabulary)
        return logprobs, entropies


@dataclass(frozen=True)
class _LossOfPart:
    """Loss of one part of a microbatch, from the scores of its tokens.

    Attributes:
        loss: Function that computes the loss of rows.
        part: The part.
        tokens: Tokens of the whole microbatch.
        first_row: Number of the part's first row in the microbatch.
        first_token: Number of that row's first token.
    """

    loss: Loss
    part: Part
    tokens: _Tokens
    first_row: int
    first_token: int

    def __call__(self, logprobs: Tensor, entropies: Tensor | None) -> Tensor:
        """Compute the part's loss, 0-d, from the scores of its tokens, [n] each."""
        logprobs = self._to_rows(logprobs)
        if entropies is not None:
            entropies = self._to_rows(entropies)
        return self.loss(self.part, logprobs, entropies)

    def _to_rows(self, x: Tensor) -> Tensor:
        return self.tokens.to_rows(x, self.first_row, len(self.part.rows), self.first_token)


def _parts(microbatch: Microbatch, tokens: _Tokens, loss: Loss) -> Iterator[output_layer.PartLoss]:
    """Yield the tokens of each part of a microbatch, and the function that computes its loss."""
    rows = [0, *accumulate(len(part.rows) for part in microbatch.parts)]
    first_tokens = tokens.first_tokens(rows)
    for number, part in enumerate(microbatch.parts):
        first = first_tokens[number]
        end = first_tokens[number + 1]
        yield slice(first, end), _LossOfPart(loss, part, tokens, rows[number], first)
