"""`MegatronPolicy`: score sequences, update on an objective, with megatron-core's schedule and optimizer."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from torch.nn import functional

from nemo_grpo.core.batch import PreparedBatch
from nemo_grpo.core.logprobs import logprobs_and_entropy
from nemo_grpo.core.objective import Objective
from nemo_grpo.engine.megatron import parallel
from nemo_grpo.engine.megatron.lora import Adapters, LoRASettings
from nemo_grpo.engine.megatron.model import build_model, transformer_config
from nemo_grpo.engine.megatron.optimizer import OptimizerSettings, with_optimizer
from nemo_grpo.engine.megatron.options import FP8_ALIGNMENT
from nemo_grpo.engine.megatron.weights import HFWeights
from nemo_grpo.engine.rollout import Sequences

log = logging.getLogger(__name__)

# What Megatron-Bridge and NeMo-RL pass: optimizer state that any later layout can load.
SHARDING = {
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
}


@dataclass(frozen=True)
class UpdateResult:
    """One optimizer step.

    Attributes: metrics: token means over the batch.  grad_norm: before clipping.  lr: that was used.
                skipped: the loss or the gradient was not finite and nothing was changed.
    """

    metrics: dict[str, float]
    grad_norm: float
    lr: float
    skipped: bool = False


@dataclass
class Microbatch:
    """Rows of a step and the column count that holds their longest sequence."""

    rows: Tensor
    length: int
    outputs: dict[str, Tensor] = field(default_factory=dict)


def own_share() -> tuple[int, int]:
    """(data-parallel rank, number of them): which sequences this rank computes."""
    return parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()


def plan_microbatches(
    lengths: Tensor,
    size: int,
    share: tuple[int, int] = (0, 1),
    group_ids: Tensor | None = None,
    device: torch.device | None = None,
) -> list[Microbatch]:
    """This rank's rows, ``size`` of similar length at a time; with ``group_ids`` one whole group each.

    Rows go round the ranks by length, so that each has about the same work.

    Args: share: (rank, number of ranks).  device: where the row numbers shall be.
    """
    rank, num_ranks = share
    if group_ids is not None:
        rows = [torch.nonzero(group_ids == g).flatten() for g in group_ids.unique()[rank::num_ranks]]
    else:
        rows = list(lengths.argsort(descending=True, stable=True)[rank::num_ranks].split(size))
    return [Microbatch(r.to(device), int(lengths[r].max())) for r in rows]


class MegatronPolicy:
    """A policy under training: one rank's part of the model, its optimizer, the schedule that runs them."""

    def __init__(
        self,
        hf: Any,
        optimizer: OptimizerSettings,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        layout: parallel.Layout | None = None,
        seed: int = 0,
        lora: LoRASettings | None = None,
        config_fields: Mapping[str, Any] = {},
    ) -> None:
        """Build the model of a transformers config; `load_weights` must follow.

        Args:   hf: transformers config object.  layout: model-parallel sizes.
                lora: train adapters only; the reference policy is then the model without them.
                config_fields: further fields of `TransformerConfig` (`options.config_fields`).
        Raises: UserError: a model or a layout that the engine cannot run.
        """
        self.device = device or torch.device("cpu")
        self.layout = layout or parallel.Layout()
        parallel.initialize(self.layout, self.device, seed)
        self.hf, self.settings = hf, optimizer
        self.config = transformer_config(hf, self.layout, dtype, **config_fields)
        self.config.finalize_model_grads_func = finalize_model_grads
        self.model = build_model(hf, self.config).to(self.device)
        self.weights = HFWeights(hf.to_dict(), self.model)
        self.reference: dict[str, Tensor] | None = None
        self.lora, self.seed = lora, seed
        self.adapters: Adapters | None = None

    def load_weights(self, hf_tensors: Mapping[str, Tensor], *, keep_reference: bool) -> None:
        """Load Hugging Face tensors and set up the optimizer on them.

        Args: keep_reference: also keep them, on the host, as the reference policy; LoRA needs no copy.
        """
        self.weights.load(hf_tensors)
        if self.lora is not None:
            self.adapters = Adapters(self.weights, self.lora, self.seed)
        elif keep_reference:
            self.reference = {name: p.detach().cpu().clone() for name, p in self.model.named_parameters()}
        self.wrapped, self.optimizer, self.scheduler = with_optimizer(self.model, self.config, self.settings)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, tensor) of the current weights, adapters merged."""
        if self.adapters is not None:
            return self.adapters.merged_tensors()
        return self.weights.named_tensors()

    @contextmanager
    def reference_weights(self) -> Iterator[None]:
        """Within the block the model computes with the reference policy's weights."""
        if self.adapters is not None:
            with self.adapters.switched_off():
                yield
            return
        if self.reference is None:
            raise RuntimeError("this policy was loaded without keep_reference")
        parameters = dict(self.model.named_parameters())
        current = {name: p.detach().clone() for name, p in parameters.items()}
        with torch.no_grad():
            for name, p in parameters.items():
                p.copy_(self.reference[name])
        try:
            yield
        finally:
            with torch.no_grad():
                for name, p in parameters.items():
                    p.copy_(current[name])

    def score(
        self, sequences: Sequences, *, micro_batch_size: int, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of every next token under the current weights, without gradient.

        Args:    temperature: divides the logits for the logprobs, as it did when the tokens were sampled.
        Returns: (logprobs, entropies), both [B, S - 1] float32, nats; 0 in the padding. Entropies are at
                 temperature 1, whatever the tokens were sampled at.
        """
        plan = plan_microbatches(sequences.lengths, micro_batch_size, own_share(), device=self.device)

        def keep(micro: Microbatch, logprobs: Tensor, entropies: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            micro.outputs = {"logprobs": logprobs, "entropies": entropies}
            return logprobs.sum(), {}

        with torch.no_grad():
            self._run(sequences, plan, keep, temperature, forward_only=True)
        shape = (sequences.input_ids.shape[0], sequences.input_ids.shape[1] - 1)
        result = {name: torch.zeros(shape, device=self.device) for name in ("logprobs", "entropies")}
        for micro in plan:
            for name, out in result.items():
                if micro.outputs:  # on the last pipeline stage
                    out[micro.rows, : micro.length - 1] = micro.outputs[name].float()
        for out in result.values():
            parallel.sum_over_data_parallel(parallel.broadcast_from_last_stage(out))
        in_padding = torch.arange(shape[1]) >= sequences.lengths[:, None] - 1
        logprobs, entropies = (out.cpu().masked_fill_(in_padding, 0.0) for out in result.values())
        return logprobs, entropies

    def update(
        self,
        objective: Objective,
        prepared: PreparedBatch,
        sequences: Sequences,
        *,
        micro_batch_size: int,
        temperature: float,
    ) -> UpdateResult:
        """One optimizer step on the given rows; loss and gradient do not depend on ``micro_batch_size``."""
        groups = prepared.batch.group_ids if objective.whole_groups_per_loss_call else None
        plan = plan_microbatches(sequences.lengths, micro_batch_size, own_share(), groups, self.device)
        prepared = prepared.to(self.device)  # whole, once: the loss of a microbatch then waits for no copy
        valid_toks, valid_seqs = prepared.batch.mask.sum(), prepared.batch.sample_mask.sum()
        # The schedule divides by the number of microbatches and DDP averages over data-parallel ranks; our
        # loss is a sum of shares. (For context-parallel ranks the schedule's own factor does it.)
        scale = len(plan) * parallel_state.get_data_parallel_world_size()
        shares: list[dict[str, Tensor]] = []

        def loss(micro: Microbatch, logprobs: Tensor, entropies: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            part = prepared.select(micro.rows, next_token_logprobs=logprobs, length=micro.length - 1)
            value, metrics = objective.loss(part, global_valid_toks=valid_toks, global_valid_seqs=valid_seqs)
            shares.append(metrics)
            return value * scale, {}

        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._run(sequences, plan, loss, temperature, forward_only=False)
        metrics = self._add_up(shares)
        lr = self.optimizer.param_groups[0]["lr"]
        grad_norm, stepped = self._step_if_finite(metrics)
        return UpdateResult(metrics, grad_norm, lr, skipped=not stepped)

    def _step_if_finite(self, metrics: dict[str, float]) -> tuple[float, bool]:
        overflow = self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        if overflow or not math.isfinite(grad_norm) or not math.isfinite(metrics.get("loss/total", 0.0)):
            log.warning("loss %s or gradient norm %s is not finite: step skipped", metrics, grad_norm)
            return grad_norm, False
        self.optimizer.step()
        self.scheduler.step(1)
        return grad_norm, True

    def _run(
        self,
        sequences: Sequences,
        plan: Sequence[Microbatch],
        loss: Callable[[Microbatch, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]],
        temperature: float,
        *,
        forward_only: bool,
    ) -> None:
        """megatron-core's forward-backward schedule over the microbatches."""

        multiple = self.layout.sequence_multiple * (FP8_ALIGNMENT if self.config.fp8 else 1)
        input_ids = sequences.input_ids.to(self.device)
        numbers = partial(_numbers, vocab_size=self.hf.vocab_size)

        def forward_step(batches: Iterator[Microbatch], model: torch.nn.Module) -> tuple[Tensor, Any]:
            micro = next(batches)
            ids = input_ids[micro.rows, : micro.length]
            ids = functional.pad(ids, (0, -(micro.length - 1) % multiple))
            own = parallel.zigzag(ids.shape[1] - 1, self.device)
            logits = model(ids[:, :-1][:, own], position_ids=None, attention_mask=None)

            def on_last_stage(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
                logprobs, entropies = numbers(output, ids[:, 1:][:, own], temperature)
                if forward_only and temperature != 1:  # scored entropies are the policy's own
                    entropies = numbers(output, ids[:, 1:][:, own], 1.0)[1]
                found = (logprobs, entropies)
                whole = (
                    parallel.gather_sequence(x, 1, replicated=True)[:, : micro.length - 1] for x in found
                )
                return loss(micro, *whole)

            return logits, on_last_stage

        longest = max(micro.length for micro in plan) - 1
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(plan),
            model=[self.wrapped],
            num_microbatches=len(plan),
            seq_length=longest + -longest % multiple,
            micro_batch_size=max(len(micro.rows) for micro in plan),
            forward_only=forward_only,
        )

    def _add_up(self, shares: list[dict[str, Tensor]]) -> dict[str, float]:
        """Sum each metric over microbatches and data-parallel ranks; one copy to the host for all of them."""
        names: list[Any] = [list(shares[0]) if shares else None]
        if self.layout.pipeline > 1:  # the last stage has them
            group = parallel_state.get_pipeline_model_parallel_group()
            dist.broadcast_object_list(
                names, parallel_state.get_pipeline_model_parallel_last_rank(), group=group
            )
        total = torch.zeros(len(names[0]), dtype=torch.float64, device=self.device)
        for share in shares:
            total += torch.stack([share[name].double() for name in names[0]])
        parallel.sum_over_data_parallel(parallel.broadcast_from_last_stage(total))
        return dict(zip(names[0], total.tolist(), strict=True))

    def sharded_state_dict(self, *, loading: bool) -> dict[str, Any]:
        """Model, optimizer and schedule, as `megatron.core.dist_checkpointing` saves and loads them.

        With LoRA the model is its adapters: the frozen base comes from where it came from at first.
        """
        if self.adapters is not None:
            model = self.adapters.sharded_state_dict()
        else:
            model = self.model.sharded_state_dict(metadata=SHARDING)
        return {
            "model": model,
            "optimizer": self.optimizer.sharded_state_dict(model, is_loading=loading, metadata=SHARDING),
            "opt_param_scheduler": self.scheduler.state_dict(),
            "checkpoint_version": 3.0,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `dist_checkpointing.load` filled in."""
        (self.adapters or self.model).load_state_dict(state["model"])
        with torch.no_grad():
            self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["opt_param_scheduler"])


def _numbers(logits: Tensor, targets: Tensor, temperature: float, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies from this tensor-parallel rank's logits."""
    group = parallel_state.get_tensor_model_parallel_group()
    return logprobs_and_entropy(logits, targets, temperature=temperature, group=group, vocab_size=vocab_size)
