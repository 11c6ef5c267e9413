"""megatron-core's forward-backward schedule over microbatches: from token ids to logprobs to a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from torch.nn import functional

from nemo_grpo.core.logprobs import logprobs_and_entropy, next_token_logprobs
from nemo_grpo.engine.megatron import parallel
from nemo_grpo.engine.megatron.microbatches import Microbatch
from nemo_grpo.engine.megatron.packing import PackedSequences

Loss = Callable[[Microbatch, Tensor, Tensor | None], Tensor]
"""(microbatch, logprobs [B, T], entropies [B, T] or None) -> 0-d; called on the last pipeline stage."""

Numbers = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class Pass:
    """One pass over some microbatches.

    Attributes: temperature: divides the logits for the logprobs.  with_entropies: also give the loss every
                token's entropy at temperature 1, without gradient.  forward_only: no gradients.
                multiple: what the length of a padded row must be a multiple of.  vocab_size: without padding.
    """

    temperature: float
    with_entropies: bool
    forward_only: bool
    multiple: int
    vocab_size: int

    def run(self, model: torch.nn.Module, input_ids: Tensor, plan: Sequence[Microbatch], loss: Loss) -> None:
        """Run the schedule; gradients are left in the model.

        Args: input_ids: [B, S], of all rows that the plan speaks of; packed microbatches have their own.
        """

        def forward_step(batches: Iterator[Microbatch], model: torch.nn.Module) -> tuple[Tensor, Any]:
            micro = next(batches)
            output, numbers = (
                self._padded(model, input_ids, micro)
                if micro.packed is None
                else self._packed(model, micro, micro.packed)
            )

            def on_last_stage(logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
                return loss(micro, *numbers(logits)), {}

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
        """Columns that speak of some token's successor, up to the next multiple."""
        return length - 1 + -(length - 1) % self.multiple

    def _padded(
        self, model: torch.nn.Module, input_ids: Tensor, micro: Microbatch
    ) -> tuple[Tensor, Callable[[Tensor], Numbers]]:
        ids = input_ids[micro.rows, : micro.length]
        ids = functional.pad(ids, (0, self._padded_length(micro.length) + 1 - micro.length))
        own = parallel.zigzag(ids.shape[1] - 1, ids.device)

        def whole(x: Tensor) -> Tensor:
            return parallel.gather_sequence(x, 1, replicated=True)[:, : micro.length - 1]

        def numbers(logits: Tensor) -> Numbers:
            logprobs, entropies = self._numbers(logits, ids[:, 1:][:, own])
            return whole(logprobs), None if entropies is None else whole(entropies)

        return model(ids[:, :-1][:, own], position_ids=None, attention_mask=None), numbers

    def _packed(
        self, model: torch.nn.Module, micro: Microbatch, packed: PackedSequences
    ) -> tuple[Tensor, Callable[[Tensor], Numbers]]:
        shape = (len(micro.rows), micro.length - 1)

        def spread(x: Tensor) -> Tensor:
            return parallel.sum_over_context_parallel(packed.spread(x, shape))

        def numbers(logits: Tensor) -> Numbers:
            if logits.shape[1] != len(packed.targets):  # under sequence parallelism: all of the stream
                logits = logits[:, packed.predicting]
            logprobs, entropies = self._numbers(logits.squeeze(0), packed.targets)
            return spread(logprobs), None if entropies is None else spread(entropies)

        output = model(
            packed.input_ids[:, packed.own], position_ids=None, attention_mask=None, packed_seq_params=packed
        )
        return output, numbers

    def _numbers(self, logits: Tensor, targets: Tensor) -> Numbers:
        """Logprobs and entropies from this tensor-parallel rank's logits."""
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
