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
from nemo_grpo.engine.megatron.output_layer import Numbers, loss_in_parts
from nemo_grpo.engine.megatron.packing import PackedSequences

Loss = Callable[[Part, Tensor, Tensor | None], Tensor]
"""(rows of a microbatch, logprobs [B, T], entropies [B, T] or None) -> 0-d; on the last pipeline stage."""


@dataclass(frozen=True)
class _Tokens:
    """The tokens of a microbatch that have logits on this rank, row after row.

    Attributes: targets: [N] int64, what they predict.
                firsts: places of rows in the microbatch -> first token of each; the end -> N.
                spread: ([n] numbers of a part's tokens; place of its first ``row``, ``num_rows``, ``first``
                    token) -> [B, T].
    """

    targets: Tensor
    firsts: Callable[[list[int]], list[int]]
    spread: Callable[..., Tensor]


@dataclass(frozen=True)
class Pass:
    """One pass over some microbatches.

    Attributes: temperature: divides the logits for the logprobs.  with_entropies: also give the loss every
                token's entropy at temperature 1, without gradient.  forward_only: no gradients.
                multiple: divisor of padded rows' lengths.  vocab_size: without padding.
                most: tokens whose logits are in memory at a time.
    """

    temperature: float
    with_entropies: bool
    forward_only: bool
    multiple: int
    vocab_size: int
    most: int

    def run(self, model: torch.nn.Module, input_ids: Tensor, plan: Sequence[Microbatch], loss: Loss) -> None:
        """Run the schedule; gradients are left in the model.

        Args: model: as `optimizer.with_optimizer` wraps it.
              input_ids: [B, S], of all rows in the plan; packed microbatches have their own.
        """

        def forward_step(batches: Iterator[Microbatch], model: Any) -> tuple[Tensor, Any]:
            micro = next(batches)
            output, tokens = (
                self._padded(model, input_ids, micro)
                if micro.packed is None
                else self._packed(model, micro, micro.packed)
            )

            def on_last_stage(hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
                weight, numbers = model.module.output_weight, partial(self._numbers, tokens.targets)
                parts = list(_parts(micro, tokens, loss))
                return loss_in_parts(hidden.flatten(0, 1), weight, parts, numbers, self.most), {}

            return output, on_last_stage

        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(plan),
            model=[model],
            num_microbatches=len(plan),
            seq_length=self._padded_length(max(micro.length for micro in plan)),
            micro_batch_size=max(len(micro.rows) for micro in plan),
            forward_only=self.forward_only,
        )

    def _padded_length(self, length: int) -> int:
        """Round the number of predicted columns up to the next multiple."""
        return length - 1 + -(length - 1) % self.multiple

    def _padded(self, model: torch.nn.Module, input_ids: Tensor, micro: Microbatch) -> tuple[Tensor, _Tokens]:
        ids = input_ids[micro.rows, : micro.length]
        ids = functional.pad(ids, (0, self._padded_length(micro.length) + 1 - micro.length))
        own = parallel.zigzag(ids.shape[1] - 1, ids.device)

        def spread(x: Tensor, row: int, num_rows: int, first: int) -> Tensor:
            whole = parallel.gather_sequence(x.view(num_rows, -1), 1, replicated=True)
            return whole[:, : micro.length - 1]

        tokens = _Tokens(ids[:, 1:][:, own].flatten(), lambda rows: [row * len(own) for row in rows], spread)
        return model(ids[:, :-1][:, own], position_ids=None, attention_mask=None), tokens

    def _packed(
        self, model: torch.nn.Module, micro: Microbatch, packed: PackedSequences
    ) -> tuple[Tensor, _Tokens]:
        def firsts(rows: list[int]) -> list[int]:
            if len(rows) == 2:  # do not wait for a GPU
                return [0, len(packed.rows)]
            return torch.searchsorted(packed.rows, packed.rows.new_tensor(rows)).tolist()

        def spread(x: Tensor, row: int, num_rows: int, first: int) -> Tensor:
            own = slice(first, first + len(x))
            whole = x.new_zeros(num_rows, micro.length - 1)
            whole = whole.index_put((packed.rows[own] - row, packed.columns[own]), x)
            return parallel.sum_over_context_parallel(whole)

        output = model(
            packed.input_ids[:, packed.own], position_ids=None, attention_mask=None, packed_seq_params=packed
        )
        return output, _Tokens(packed.targets, firsts, spread)

    def _numbers(self, targets: Tensor, logits: Tensor, where: slice) -> Numbers:
        targets = targets[where]
        shard: dict[str, Any] = {
            "group": parallel_state.get_tensor_model_parallel_group(),
            "vocab_size": self.vocab_size,
        }
        if self.with_entropies and self.temperature == 1:
            logprobs, entropies = logprobs_and_entropy(logits, targets, **shard)
            return logprobs, entropies.detach()
        logprobs = next_token_logprobs(logits, targets, temperature=self.temperature, **shard)
        if not self.with_entropies:
            return logprobs, None
        with torch.no_grad():
            return logprobs, logprobs_and_entropy(logits, targets, **shard)[1]


def _parts(micro: Microbatch, tokens: _Tokens, loss: Loss) -> Iterator[output_layer.PartLoss]:
    rows = [0, *accumulate(len(part.rows) for part in micro.parts)]
    firsts = tokens.firsts(rows)
    for part, row, first, end in zip(micro.parts, rows[:-1], firsts[:-1], firsts[1:], strict=True):
        spread = partial(tokens.spread, row=row, num_rows=len(part.rows), first=first)

        def part_loss(
            logprobs: Tensor, entropies: Tensor | None, part: Part = part, spread: Any = spread
        ) -> Tensor:
            return loss(part, spread(logprobs), None if entropies is None else spread(entropies))

        yield slice(first, end), part_loss
