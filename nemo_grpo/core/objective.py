"""`Objective`: a step-level part that sees whole groups, a token-level part for any split of them.

prepare:  rewards, scored logprobs -> advantages [B, T] (+ token weights)      once per step, on whole groups
loss:     current logprobs -> - aggregate( policy term - beta KL term )          per microbatch, on any rows
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from nemo_grpo.core.advantages import GroupAdvantages
from nemo_grpo.core.aggregation import Aggregation, aggregate, metric_shares
from nemo_grpo.core.batch import PreparedBatch, TokenBatch
from nemo_grpo.core.importance import ImportanceCorrection
from nemo_grpo.core.metrics import step_metrics

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Shaped:
    """What a variant makes of a step: advantages, optional token weights [B, T], from group advantages."""

    advantages: Tensor
    base: GroupAdvantages
    token_weights: Tensor | None = None
    metrics: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenTerms:
    """Per-token objective, [B, T]: policy term, KL term (None: no penalty), metrics.

    Metrics are [B, T], to be averaged over tokens, or [B], to be averaged over sequences; no gradient.
    """

    policy: Tensor
    kl: Tensor | None = None
    metrics: dict[str, Tensor] = field(default_factory=dict)


Shape = Callable[[TokenBatch, int], Shaped]
Terms = Callable[[PreparedBatch], TokenTerms]
FurtherMetrics = Callable[[PreparedBatch, "dict[str, Tensor]"], "dict[str, Tensor]"]


@dataclass(frozen=True)
class Objective:
    """An algorithm, as two plain functions and a normalisation.

    Attributes:
        name: the variant's name.
        shape: (whole clean step, seed) -> `Shaped`.
        terms: (clean rows) -> `TokenTerms`.
        aggregation, max_response_length: see `aggregate`.
        kl_penalty: beta, the factor of the KL term.
        correction: reweighting of the policy term by policy over sampler, or None.
        needs_entropy, needs_reference: which optional tensors of `TokenBatch` must be given.
        needs_prev_logprobs: ``shape`` reads the logprobs or entropies of scoring. Where it does not, the
            advantages follow from rewards alone, and the forward pass of a step's only update can score.
        whole_groups_per_loss_call: the loss needs exactly one complete group per call (CW-GRPO's
            author_compat).
    """

    name: str
    shape: Shape
    terms: Terms
    aggregation: Aggregation = "token_mean"
    max_response_length: int | None = None
    kl_penalty: float = 0.0
    correction: ImportanceCorrection | None = None
    needs_entropy: bool = False
    needs_reference: bool = False
    needs_prev_logprobs: bool = True
    whole_groups_per_loss_call: bool = False

    def prepare(self, batch: TokenBatch, *, seed: int = 0) -> PreparedBatch:
        """Decide everything that spans sequences. Once per step, with whole groups; no gradient flows here.

        Args:   batch: every sequence of the step.  seed: the step's, for variants that draw (Clip-Cov, random
                weights).
        Raises: ValueError: an optional tensor is missing that the variant needs.
        """
        if self.needs_entropy and batch.entropies is None:
            raise ValueError(
                f"{self.name} needs TokenBatch.entropies (full-vocabulary entropy at scoring time)"
            )
        if self.needs_reference and batch.reference_policy_logprobs is None:
            raise ValueError(f"{self.name} needs TokenBatch.reference_policy_logprobs")
        clean = batch.clean()
        scored = replace(clean, next_token_logprobs=clean.prev_logprobs.detach())
        shaped = self.shape(scored, seed)
        metrics = step_metrics(scored, shaped.advantages, shaped.base) | shaped.metrics
        return PreparedBatch(clean, shaped.advantages, shaped.base.sizes, shaped.token_weights, metrics)

    def loss(
        self,
        prepared: PreparedBatch,
        *,
        global_valid_toks: Tensor | float,
        global_valid_seqs: Tensor | float,
        further: FurtherMetrics | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """This part's share of the step's loss; the shares of any split add up to the whole.

        loss = - aggregate( w policy - beta KL ),  w of `correction`, else 1

        Args:    prepared: any rows of the prepared step, with the current policy's logprobs.
                 global_valid_toks, global_valid_seqs: counts over the whole step (`global_counts`).
                 further: (rows, metrics of the terms) -> more metrics of the same kind.
        Returns: 0-d loss with gradient; metrics, each a share of a mean over the step (sum them over parts).
        """
        terms, metrics = self.token_terms(prepared)
        counts, beta = prepared.batch.counts, self.kl_penalty
        loss = -aggregate(
            terms.policy if terms.kl is None else terms.policy - beta * terms.kl,
            counts,
            self.aggregation,
            global_valid_toks=global_valid_toks,
            global_valid_seqs=global_valid_seqs,
            max_response_length=self.max_response_length,
        )
        if further is not None:
            metrics |= further(prepared, metrics)
        shares = metric_shares(metrics, counts, global_valid_toks, global_valid_seqs)
        return loss, shares | {"loss/total": loss.detach()}

    def token_terms(self, prepared: PreparedBatch) -> tuple[TokenTerms, dict[str, Tensor]]:
        """The corrected terms of any rows, and every metric that goes with them, [B, T] or [B]."""
        terms = self.terms(prepared)
        metrics = {"loss/policy": -terms.policy.detach(), **terms.metrics}
        if self.correction is not None:
            weights, about = self.correction.weights(prepared.batch)
            terms = replace(terms, policy=weights * terms.policy)
            metrics |= {"loss/policy": -terms.policy.detach()} | about
        if terms.kl is not None:
            metrics["kl/reference"] = terms.kl.detach()
        return terms, metrics
