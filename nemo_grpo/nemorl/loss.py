"""A variant's token loss as a NeMo-RL loss object; it runs on the workers, once per microbatch or sequence.

NeMo-RL's ``data`` holds ``[B, S]`` tensors whose index t belongs to token t; `next_token_logprobs` are
already ``[B, S - 1]``. Only here the first column is cut off, to align the two.

Everything that spans sequences is in ``data["advantages"]`` (and ``data["token_weights"]``), computed on the
driver by `advantage`. Results are shares of means over NeMo-RL's global batch, which NeMo-RL adds up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nemo_grpo.core.batch import PreparedBatch, TokenBatch
from nemo_grpo.core.statistics import zero_outside
from nemo_grpo.nemorl import compat
from nemo_grpo.support.extensions import receive_files, texts_of
from nemo_grpo.variants import parse_loss_fn
from nemo_grpo.variants.base import VariantConfig

if TYPE_CHECKING:
    from nemo_grpo.nemorl.config import ClusterRun

NORMALIZER = "nemo_rl.algorithms.loss.interfaces:MetricNormalizer"
"""Counts that NeMo-RL divides a metric by when a step comes in chunks; 0.7.0 has none."""
LOG_2 = 0.6931471805599453
STOCK_NAMES = {
    "loss/total": "loss",
    "ratio/mean": "probs_ratio",
    "kl/reference": "kl_penalty",
    "importance/outside": "is_oob_ratio",
    "importance/weight": "sampling_importance_ratio",
}
"""Our metric -> NeMo-RL's name for it."""


class ObjectiveLoss:
    """NeMo-RL's `LossFunction` for any variant.

    Attributes:
        config: the variant.
        folded: the advantages carry token weights and row factors, as on NeMo-RL's data plane.
        reference_policy_kl_penalty: NeMo-RL computes the unfiltered logprobs under top-k and top-p only for a
            loss that has it above 0.
        metric_normalizations: name of each metric -> NeMo-RL's name for the count that it is divided by;
            empty for a NeMo-RL without such names.
    """

    def __init__(
        self, config: VariantConfig, *, use_fused_linear_logprobs: bool = False, folded: bool = False
    ) -> None:
        self.config = config
        self.folded = folded
        self.use_fused_linear_logprobs = use_fused_linear_logprobs
        self.reference_policy_kl_penalty = getattr(config, "reference_policy_kl_penalty", 0.0)
        self.objective = config.build().folded() if folded else config.build()
        assert not self.objective.whole_groups_per_loss_call, "recipe.cluster_rules refuses it"
        # Filled by every call, because the metrics of an own variant are known once it has computed them.
        # NeMo-RL's worker takes this dictionary before its first call, and reads it after its last one.
        self.metric_normalizations: dict[str, Any] = {}

    def __reduce__(self) -> Any:
        """Pickle the recipe's section and the text of a user's own variant, so that workers need no file."""
        section = self.config.model_dump()
        files = texts_of([self.config.variant])
        return _unpickled_loss, (section, files, self.use_fused_linear_logprobs, self.folded)

    @property
    def input_type(self) -> Any:
        """Ask NeMo-RL for the logprobs of the tokens, gathered over TP and CP."""
        return compat.import_name("nemo_rl.algorithms.loss.interfaces:LossInputType").LOGPROB

    @property
    def loss_type(self) -> Any:
        """Name the count that the loss is divided by: valid tokens or valid sequences."""
        levels = compat.import_name("nemo_rl.algorithms.loss.interfaces:LossType")
        return levels.TOKEN_LEVEL if self.config.aggregation == "token_mean" else levels.SEQUENCE_LEVEL

    def __call__(
        self,
        next_token_logprobs: Tensor,
        data: Mapping[str, Any],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
    ) -> tuple[Tensor, dict[str, float]]:
        """Compute the share of the loss and of the metrics that these rows contribute.

        Args:
            next_token_logprobs: [B, S - 1] float32.
            data: NeMo-RL's batch of the same rows; ``prev_logprobs``, ``generation_logprobs``,
                ``reference_policy_logprobs``, ``advantages`` and ``token_mask`` are [B, S], ``sample_mask``
                and ``row_factors`` are [B].
            global_valid_seqs: responses that count in the global batch.
            global_valid_toks: tokens that count in the global batch.

        Returns:
            The loss, 0-d with gradient, and the metrics as numbers.
        """
        prepared = self.prepared(next_token_logprobs, data)
        loss, metrics = self.objective.loss(
            prepared,
            global_valid_toks=global_valid_toks,
            global_valid_seqs=global_valid_seqs,
            further=self._further_metrics,
        )
        names = [STOCK_NAMES.get(name, name) for name in metrics]
        # Stacked, because every copy from the device waits for it.
        values = torch.stack([value.float() for value in metrics.values()]).tolist()
        numbers = dict(zip(names, values, strict=True))
        low, high = self._clip_bounds()
        numbers |= _extremes(numbers, low, high)
        return loss, numbers

    def prepared(self, next_token_logprobs: Tensor, data: Mapping[str, Any]) -> PreparedBatch:
        """Align NeMo-RL's rows for the objective, with clean values outside the mask."""

        def aligned(name: str) -> Any:
            return data[name][:, 1:] if name in data else None

        if self.config.force_on_policy_ratio:
            # NeMo-RL then scores nothing, and data["prev_logprobs"] is zeros.
            prev_logprobs = next_token_logprobs.detach()
        else:
            prev_logprobs = data["prev_logprobs"][:, 1:]
        sample_mask = data["sample_mask"]
        unused = torch.zeros_like(sample_mask, dtype=torch.int64)
        needs_kl = self.reference_policy_kl_penalty > 0
        batch = TokenBatch(
            next_token_logprobs=next_token_logprobs,
            prev_logprobs=prev_logprobs,
            generation_logprobs=aligned("generation_logprobs"),
            reference_policy_logprobs=aligned("reference_policy_logprobs") if needs_kl else None,
            unfiltered_logprobs=data.get("curr_logprobs_unfiltered") if needs_kl else None,
            token_mask=data["token_mask"][:, 1:],
            sample_mask=sample_mask,
            rewards=unused,
            group_ids=unused,
        ).clean()
        weights = aligned("token_weights")
        return PreparedBatch(
            batch=batch,
            advantages=zero_outside(data["advantages"][:, 1:], batch.mask),
            group_sizes=unused,
            token_weights=None if weights is None else torch.where(batch.mask, weights, 1.0),
            row_factors=data.get("row_factors"),
        )

    def _further_metrics(self, prepared: PreparedBatch, metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute NeMo-RL's additional metrics, and note what each metric is divided by."""
        further = self._stock_metrics(prepared, metrics)
        self._note_denominators({**metrics, **further})
        return further

    def _note_denominators(self, metrics: Mapping[str, Tensor]) -> None:
        """Fill `metric_normalizations` for metrics of tokens [B, T], of responses [B] or of the call, 0-d."""
        # 0.7.0 has no names for the counts.
        if not compat.has_name(NORMALIZER):
            return
        kinds = compat.import_name(NORMALIZER)
        by_dimensions = {0: kinds.NONE, 1: kinds.SEQUENCES, 2: kinds.TOKENS}
        table = self.metric_normalizations
        for name, values in metrics.items():
            table[STOCK_NAMES.get(name, name)] = by_dimensions[values.dim()]
        for name in EXTREMES:
            table[name] = kinds.NONE
        table["loss"] = kinds.TOKENS if self.config.aggregation == "token_mean" else kinds.SEQUENCES

    def _stock_metrics(self, prepared: PreparedBatch, metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute the additional metrics of NeMo-RL's own loss, by its names.

        With d = logp_prev - logp_gen, r = exp(d):  k3(gen, prev) = r - d - 1, k3(prev, gen) = 1/r + d - 1,
        Jensen-Shannon estimate = log(1 + r) - d/2 - log 2,  max(r, 1/r) = exp(|d|)
        """
        batch = prepared.batch
        ratio = metrics["ratio/mean"]
        current = batch.next_token_logprobs.detach()
        d = batch.prev_logprobs - batch.generation_logprobs
        r = torch.exp(d)
        inverse = r.reciprocal()
        low, high = self._clip_bounds()
        largest = torch.finfo(ratio.dtype).max / 2
        return {
            "importance/weight": metrics.get("importance/weight", r),
            "token_mult_prob_error": torch.maximum(r, inverse),
            "gen_kl_error": (r - 1).sub_(d),
            "policy_kl_error": inverse.sub_(1).add_(d),
            "js_divergence_error": torch.log1p(r).sub_(d, alpha=0.5).sub_(LOG_2),
            "approx_entropy": (current - batch.generation_logprobs).exp_().mul_(current).neg_(),
            "probs_ratio_clamped": ratio.clamp(low, high),
            "num_valid_samples": batch.sample_mask.sum(),
            # Extremes over the tokens that count. The minimum adds a huge number to all other tokens, and the
            # maximum sets them to 0. If no token counts, the maximum is 0, which `_extremes` recognises.
            "probs_ratio_min": torch.add(ratio, 1 - batch.counts, alpha=largest).amin(),
            "probs_ratio_max": (ratio * batch.counts).amax(),
        }

    def _clip_bounds(self) -> tuple[float, float]:
        # Read by name: CISPO bounds its weight by the same keys, but has no base class in common with the
        # clipped variants.
        clip_min = getattr(self.config, "ratio_clip_min", None)
        clip_max = getattr(self.config, "ratio_clip_max", None)
        if clip_min is None or clip_max is None:
            return 0.0, float("inf")
        return 1 - clip_min, 1 + clip_max


EXTREMES = ("probs_ratio_min", "probs_ratio_max", "probs_ratio_clamped_min", "probs_ratio_clamped_max")
"""Metrics that NeMo-RL combines by min and max instead of a sum; infinite if no token counts."""


def _extremes(metrics: Mapping[str, float], low: float, high: float) -> dict[str, float]:
    """Find the extremes of ratio and clamped ratio, from numbers already on the host."""
    smallest = metrics["probs_ratio_min"]
    largest = metrics["probs_ratio_max"]
    if largest == 0:
        # No token counts here: infinities change nothing in NeMo-RL's minimum and maximum over all calls.
        return {
            "probs_ratio_min": math.inf,
            "probs_ratio_max": -math.inf,
            "probs_ratio_clamped_min": math.inf,
            "probs_ratio_clamped_max": -math.inf,
        }
    return {
        "probs_ratio_min": smallest,
        "probs_ratio_max": largest,
        "probs_ratio_clamped_min": min(max(smallest, low), high),
        "probs_ratio_clamped_max": min(max(largest, low), high),
    }


def _unpickled_loss(
    section: Mapping[str, Any], own_files: Mapping[str, str], use_fused_linear_logprobs: bool, folded: bool
) -> ObjectiveLoss:
    """Make a loss from what `ObjectiveLoss.__reduce__` pickled."""
    receive_files(own_files)
    return ObjectiveLoss(
        parse_loss_fn(section), use_fused_linear_logprobs=use_fused_linear_logprobs, folded=folded
    )


def loss_of(run: ClusterRun) -> ObjectiveLoss:
    """Make the loss of a run, with the options that follow from NeMo-RL's configuration."""
    return ObjectiveLoss(
        run.recipe.loss_fn,
        use_fused_linear_logprobs=run.fuses_linear_logprobs,
        folded=run.recipe.uses_data_plane,
    )
