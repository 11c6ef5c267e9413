"""megatron-core's forward-backward schedule over microbatches: from token ids to logprobs to a loss."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

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
"""(rows of a microbatch, logprobs [B, T], entropies [B, T] or None) -> 0-d; on the last pipeline stage."""


@dataclass(frozen=True)
class _Tokens:
    """The tokens of a microbatch that have logits on this rank, row after row.

    Attributes:
        targets: [N] int64, the tokens that they predict.
        first_tokens: (places of rows in the microbatch) -> place of the first token of each; the number of
            rows gives N.
        to_rows: ([n] numbers of a part's tokens, place of its first ``row``, ``num_rows``, place of its
            ``first`` token) -> [B, T].
    """

    targets: Tensor
    first_tokens: Callable[[list[int]], list[int]]
    to_rows: Callable[..., Tensor]


@dataclass(frozen=True)
class Pass:
    """One pass over some microbatches.

    Attributes:
        temperature: divides the logits for the logprobs.
        with_entropies: also give the loss every token's entropy at temperature 1, without gradient.
        forward_only: compute no gradients.
        multiple: divisor of padded rows' lengths.
        vocab_size: without padding.
        max_tokens: most tokens whose logits are in memory at a time.
    """

    temperature: float
    with_entropies: bool
    forward_only: bool
    multiple: int
    vocab_size: int
    max_tokens: int

    def run(self, model: torch.nn.Module, input_ids: Tensor, plan: Sequence[Microbatch], loss: Loss) -> None:
        """Run the schedule; gradients are left in the model.

        Args:
            model: as `optimizer.with_optimizer` wraps it.
            input_ids: [B, S], of all rows in the plan; packed microbatches have their own.
            plan: this rank's microbatches, at least one.
            loss: of the rows of one part of a microbatch.
        """

        def forward_step(microbatches: Iterator[Microbatch], model: Any) -> tuple[Tensor, Any]:
            microbatch = next(microbatches)
            if microbatch.packed is None:
                output, tokens = self._padded(model, input_ids, microbatch)
            else:
                output, tokens = self._packed(model, microbatch, microbatch.packed)

            # megatron-core calls this on the last pipeline stage alone; `output` goes to the next one.
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
            # Required; with variable_seq_lengths the stages tell each other the shapes instead.
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
            (the model's output, the tokens that it predicts).
        """
        ids = input_ids[microbatch.rows, : microbatch.length]
        # One column more than is computed: the last one is only predicted.
        ids = functional.pad(ids, (0, self._padded_length(microbatch.length) + 1 - microbatch.length))
        columns = parallel.zigzag(ids.shape[1] - 1, ids.device)
        num_columns = len(columns)

        def first_tokens(rows: list[int]) -> list[int]:
            return [row * num_columns for row in rows]

        def to_rows(x: Tensor, row: int, num_rows: int, first: int) -> Tensor:
            whole = parallel.gather_sequence(x.view(num_rows, -1), 1, replicated=True)
            return whole[:, : microbatch.length - 1]

        tokens = _Tokens(ids[:, 1:][:, columns].flatten(), first_tokens, to_rows)
        return model(ids[:, :-1][:, columns], position_ids=None, attention_mask=None), tokens

    def _packed(
        self, model: torch.nn.Module, microbatch: Microbatch, packed: PackedSequences
    ) -> tuple[Tensor, _Tokens]:
        """Run the model on a stream of packed sequences.

        Returns:
            (the model's output, the tokens that it predicts).
        """

        def first_tokens(rows: list[int]) -> list[int]:
            # One part: its tokens are all of them, and nothing has to wait for a GPU.
            if len(rows) == 2:
                return [0, len(packed.rows)]
            return torch.searchsorted(packed.rows, packed.rows.new_tensor(rows)).tolist()

        def to_rows(x: Tensor, row: int, num_rows: int, first: int) -> Tensor:
            places = slice(first, first + len(x))
            whole = x.new_zeros(num_rows, microbatch.length - 1)
            whole = whole.index_put((packed.rows[places] - row, packed.columns[places]), x)
            return parallel.sum_over_context_parallel(whole)

        local_ids = packed.input_ids[:, packed.local_places]
        output = model(local_ids, position_ids=None, attention_mask=None, packed_seq_params=packed)
        return output, _Tokens(packed.targets, first_tokens, to_rows)

    def _score_tokens(self, targets: Tensor, logits: Tensor, where: slice) -> TokenScores:
        """Compute logprobs and entropies of some tokens.

        Args:
            targets: [N], all tokens of the microbatch.
            logits: [n, V], of the tokens at ``where``; under tensor parallelism this rank's vocabulary.
        """
        targets = targets[where]
        vocabulary: dict[str, Any] = {
            "group": parallel_state.get_tensor_model_parallel_group(),
            "vocab_size": self.vocab_size,
        }
        # At temperature 1 both come from one softmax.
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
        first_row: place of the part's first row in the microbatch.
        first_token: place of that row's first token.
    """

    loss: Loss
    part: Part
    tokens: _Tokens
    first_row: int
    first_token: int

    def __call__(self, logprobs: Tensor, entropies: Tensor | None) -> Tensor:
        """[n] each -> 0-d."""
        logprobs = self._to_rows(logprobs)
        if entropies is not None:
            entropies = self._to_rows(entropies)
        return self.loss(self.part, logprobs, entropies)

    def _to_rows(self, x: Tensor) -> Tensor:
        num_rows = len(self.part.rows)
        return self.tokens.to_rows(x, row=self.first_row, num_rows=num_rows, first=self.first_token)


def _parts(microbatch: Microbatch, tokens: _Tokens, loss: Loss) -> Iterator[output_layer.PartLoss]:
    """Yield the tokens of each part of a microbatch, with the loss of their scores."""
    rows = [0, *accumulate(len(part.rows) for part in microbatch.parts)]
    first_tokens = tokens.first_tokens(rows)
    for number, part in enumerate(microbatch.parts):
        first = first_tokens[number]
        end = first_tokens[number + 1]
        yield slice(first, end), _LossOfPart(loss, part, tokens, rows[number], first)
