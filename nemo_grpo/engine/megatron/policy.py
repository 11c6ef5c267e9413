"""`MegatronPolicy`: the policy on megatron-core, which scores sequences and is updated on an objective."""

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from torch import Tensor

from nemo_grpo.core.batch import PreparedBatch, Sequences
from nemo_grpo.core.objective import Objective
from nemo_grpo.engine.megatron import parallel
from nemo_grpo.engine.megatron.hf_weights import HFWeights
from nemo_grpo.engine.megatron.lora import Adapters, LoRASettings
from nemo_grpo.engine.megatron.microbatches import (
    Microbatch,
    Part,
    Scores,
    UpdateResult,
    data_parallel_share,
)
from nemo_grpo.engine.megatron.model import build_model, transformer_config
from nemo_grpo.engine.megatron.optimizer import SHARDING, clip_and_step, with_optimizer
from nemo_grpo.engine.megatron.options import fp8_alignment
from nemo_grpo.engine.megatron.planner import Planner
from nemo_grpo.engine.megatron.schedule import Loss, Pass
from nemo_grpo.models import COMPUTED, read_spec
from nemo_grpo.recipe.layout import Layout
from nemo_grpo.recipe.megatron_sections import MegatronOptimizer, MegatronScheduler

log = logging.getLogger(__name__)

# megatron-core requires a number of decay steps, on which a constant learning rate does not depend.
_CONSTANT = MegatronScheduler(lr_decay_iters=1000)


class MegatronPolicy:
    """A policy under training: this rank's part of the model, with optimizer and learning-rate schedule."""

    def __init__(
        self,
        hf: Any,
        optimizer: MegatronOptimizer,
        schedule: MegatronScheduler = _CONSTANT,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        layout: Layout | None = None,
        seed: int = 0,
        lora: LoRASettings | None = None,
        config_fields: Mapping[str, Any] = {},
    ) -> None:
        """Build the model that a transformers config describes. `load_weights` must be called next.

        Args:
            hf: Config object of transformers.
            optimizer: Section of the recipe for the optimizer.
            schedule: Section of the recipe for the schedule.
            dtype: Precision of the parameters.
            device: Device of this rank.
            layout: Sizes of model parallelism.
            seed: Seed of the adapters and of megatron-core.
            lora: Settings of adapters, if only these are trained. The reference policy is then the model
                without adapters.
            config_fields: Further fields of `TransformerConfig` (`options.config_fields`).
        """
        self.device = device or torch.device("cpu")
        self.layout = layout or Layout()
        parallel.initialize(self.layout, self.device, seed)
        self.hf = hf
        self.sections = (optimizer, schedule)
        spec = read_spec(hf.to_dict(), among=COMPUTED)
        self.config = transformer_config(spec, self.layout, dtype, **config_fields)
        self.config.finalize_model_grads_func = finalize_model_grads
        self.model = build_model(spec, self.config).to(self.device)
        self.weights = HFWeights(hf.to_dict(), self.model)
        self.reference: dict[str, Tensor] | None = None
        self.lora = lora
        self.seed = seed
        self.adapters: Adapters | None = None
        # Transformer Engine's attention has no shared prompts, so its packed sequences repeat them.
        self.share_prompts = self.config.transformer_impl == "local"

    def load_weights(self, hf_tensors: Mapping[str, Tensor], *, keep_reference: bool) -> None:
        """Load Hugging Face tensors as the model's weights, then build the optimizer.

        Args:
            hf_tensors: All tensors of the model, by name.
            keep_reference: True to keep a copy on the host as the reference policy. LoRA needs no copy.
        """
        self.weights.load(hf_tensors)
        if self.lora is not None:
            self.adapters = Adapters(self.weights, self.lora, self.seed)
        elif keep_reference:
            self.reference = {name: _host_copy(p) for name, p in self.model.named_parameters()}
        # The optimizer is built last. It copies 16-bit weights to float32 when it is built, and with LoRA it
        # must find the adapters and a frozen model.
        self.wrapped, self.optimizer, self.scheduler = with_optimizer(self.model, self.config, *self.sections)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the Hugging Face name and the tensor of all current weights, with adapters merged."""
        if self.adapters is not None:
            return self.adapters.merged_tensors()
        return self.weights.named_tensors()

    @contextmanager
    def reference_weights(self) -> Iterator[None]:
        """Give the model the reference policy's weights within the block."""
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
                p.copy_(self.reference[name], non_blocking=True)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, p in parameters.items():
                    p.copy_(current[name])

    def score(
        self,
        sequences: Sequences,
        *,
        micro_batch_size: int,
        temperature: float,
        mb_tokens: int | None = None,
        with_entropies: bool = True,
    ) -> Scores:
        """Compute the logprob and the entropy of every next token by the current weights, without gradient.

        Args:
            sequences: All rows of the step.
            micro_batch_size: Number of sequences in a microbatch, if sequences are not packed.
            temperature: Divisor of the logits for the logprobs: the temperature of the sampling.
            mb_tokens: Largest number of tokens in a microbatch, to pack sequences; None to pad them.
            with_entropies: True to compute entropies, too.
        """
        plan = self.planner.plan(sequences, micro_batch_size, mb_tokens)

        def keep(part: Part, logprobs: Tensor, entropies: Tensor | None) -> Tensor:
            part.keep(logprobs, entropies)
            # megatron-core's schedule needs a loss from every microbatch. This one is not used.
            return logprobs.sum()

        with torch.no_grad():
            self._run(sequences, plan, keep, temperature, with_entropies=with_entropies, forward_only=True)
        return self._collect(sequences, plan, with_entropies)

    def update(
        self,
        objective: Objective,
        prepared: PreparedBatch,
        sequences: Sequences,
        *,
        micro_batch_size: int,
        temperature: float,
        mb_tokens: int | None = None,
        scoring: bool = False,
    ) -> UpdateResult:
        """Make one optimizer step on these rows. Loss and gradient do not depend on the microbatches.

        Rows without a gradient are left out of the model's passes. They still count in every denominator, and
        in the metrics with ``prev_logprobs`` as their logprobs.

        Args:
            objective: Objective of the recipe's variant.
            prepared: Prepared batch of these rows.
            sequences: Sequences of these rows.
            micro_batch_size: See `score`.
            temperature: See `score`.
            mb_tokens: See `score`.
            scoring: True if `score` was not called since the last update. The current logprobs then also
                serve as the previous ones, so the ratio is 1, with a gradient. The result has `Scores`.
        """
        plan, computed_rows, skipped_rows = self.planner.plan_update(
            objective, prepared, sequences, micro_batch_size, mb_tokens
        )
        # The whole batch is moved at once, so that the loss of a microbatch does not wait for a copy.
        prepared = prepared.to(self.device)
        valid_toks = prepared.batch.mask.sum()
        valid_seqs = prepared.batch.sample_mask.sum()
        shares_of_metrics: list[dict[str, Tensor]] = []

        def share_of_loss(rows: PreparedBatch) -> Tensor:
            loss, metrics = objective.loss(rows, global_valid_toks=valid_toks, global_valid_seqs=valid_seqs)
            shares_of_metrics.append(metrics)
            return loss

        # Our loss is a sum over microbatches and data-parallel ranks. megatron-core's schedule divides by the
        # number of microbatches, and its DDP averages over the ranks; this factor undoes both. For
        # context-parallel ranks the schedule has a factor itself.
        scale = len(plan) * parallel_state.get_data_parallel_world_size()

        def loss_of_part(part: Part, logprobs: Tensor, entropies: Tensor | None) -> Tensor:
            rows = prepared.select(part.rows, next_token_logprobs=logprobs, length=part.length - 1)
            if scoring:
                rows = rows.on_policy()
                part.keep(logprobs.detach(), entropies)
            return share_of_loss(rows) * scale

        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._run(sequences, plan, loss_of_part, temperature, with_entropies=scoring, forward_only=False)

        # Rows that were left out still count in the metrics. Each rank adds its share of them.
        rank, num_ranks = data_parallel_share()
        local_skipped_rows = skipped_rows[rank::num_ranks].to(self.device)
        if len(local_skipped_rows):
            unchanged = prepared.batch.prev_logprobs[local_skipped_rows]
            share_of_loss(prepared.select(local_skipped_rows, next_token_logprobs=unchanged))
        metrics = self._sum_metrics(shares_of_metrics)

        lr = self.optimizer.param_groups[0]["lr"]
        grad_norm, has_stepped = self._step_if_finite(metrics)
        scores = self._collect(sequences, plan, True) if scoring else None
        computed = torch.zeros(len(sequences.lengths), dtype=torch.bool).index_fill_(0, computed_rows, True)
        return UpdateResult(metrics, grad_norm, lr, skipped=not has_stepped, scores=scores, computed=computed)

    def _step_if_finite(self, metrics: dict[str, float]) -> tuple[float, bool]:
        """Clip the gradient and step, unless the gradient or the loss is not finite.

        Returns:
            (norm of the gradient before clipping, True if the optimizer has made a step).
        """
        overflow = self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        is_finite = math.isfinite(grad_norm) and math.isfinite(metrics.get("loss/total", 0.0))
        if overflow or not is_finite:
            log.warning("loss %s or gradient norm %s is not finite: step skipped", metrics, grad_norm)
            return grad_norm, False
        clip_and_step(self.optimizer, grad_norm)
        self.scheduler.step(1)
        return grad_norm, True

    @property
    def planner(self) -> Planner:
        """Planner of this rank's microbatches."""
        return Planner(
            multiple=self.sequence_multiple,
            max_tokens=self.max_tokens,
            share_prompts=self.share_prompts,
            dtype=self.config.params_dtype,
            device=self.device,
        )

    @property
    def max_tokens(self) -> int:
        """Largest number of tokens whose logits are in memory at a time."""
        return self.layout.tokens_at_once(self.hf.vocab_size, self.device.type)

    @property
    def sequence_multiple(self) -> int:
        """Multiple to which the number of columns of a microbatch is padded."""
        fp8_recipe = self.config.fp8_recipe if self.config.fp8 else None
        return self.layout.sequence_multiple * fp8_alignment(fp8_recipe)

    def _run(
        self,
        sequences: Sequences,
        plan: list[Microbatch],
        loss: Loss,
        temperature: float,
        *,
        with_entropies: bool,
        forward_only: bool,
    ) -> None:
        schedule = Pass(
            temperature=temperature,
            with_entropies=with_entropies,
            forward_only=forward_only,
            multiple=self.sequence_multiple,
            vocab_size=self.hf.vocab_size,
            max_tokens=self.max_tokens,
        )
        schedule.run(self.wrapped, sequences.input_ids.to(self.device), plan, loss)

    def _collect(self, sequences: Sequences, plan: list[Microbatch], with_entropies: bool) -> Scores:
        """Gather the stored results of all microbatches, for every rank."""
        num_rows, num_columns = sequences.input_ids.shape
        num_kinds = 2 if with_entropies else 1
        results = torch.zeros(num_kinds, num_rows, num_columns - 1, device=self.device)
        for microbatch in plan:
            for part in microbatch.parts:
                for kind, output in enumerate(part.outputs):
                    results[kind][part.rows, : part.length - 1] = output.float()
        # One data-parallel rank has computed each row, and the others have 0 there, so a sum gathers them.
        parallel.sum_of_last_stages(results)
        in_padding = torch.arange(num_columns - 1) >= sequences.lengths[:, None] - 1
        results = results.cpu().masked_fill_(in_padding, 0.0)
        return Scores(results[0], results[1] if with_entropies else None)

    def _sum_metrics(self, shares: list[dict[str, Tensor]]) -> dict[str, float]:
        """Sum each metric over microbatches and data-parallel ranks, with one copy to the host for all."""
        local_names = list(shares[0]) if shares else None
        # Only the last pipeline stage computes a loss, so the other stages get the metrics' names from it.
        # The broadcast replaces the only object in a list.
        broadcast: list[Any] = [local_names]
        if self.layout.pipeline > 1:
            group = parallel_state.get_pipeline_model_parallel_group()
            last_rank = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast_object_list(broadcast, last_rank, group=group)
        names: list[str] = broadcast[0]

        # The sum is in float64, so that the split into microbatches does not show in the metrics.
        total = torch.zeros(len(names), dtype=torch.float64, device=self.device)
        for share in shares:
            total += torch.stack([share[name].double() for name in names])
        parallel.sum_of_last_stages(total)
        return dict(zip(names, total.tolist(), strict=True))

    def sharded_state_dict(self, *, loading: bool) -> dict[str, Any]:
        """Describe model, optimizer and schedule for `megatron.core.dist_checkpointing`.

        With LoRA only the adapters are described: a resumed run loads the frozen base model as at its start.

        Args:
            loading: True to load a checkpoint, False to save one.
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
        """Load the state that `dist_checkpointing.load` has read."""
        if self.adapters is not None:
            self.adapters.load_state_dict(state["model"])
        else:
            self.model.load_state_dict(state["model"])
        with torch.no_grad():
            self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["opt_param_scheduler"])


def _host_copy(parameter: Tensor) -> Tensor:
    """Copy a parameter to the host. From a GPU it goes to pinned memory, so that copying back is fast."""
    if parameter.is_cuda:
        return parameter.detach().cpu().pin_memory()
    return parameter.detach().clone()
