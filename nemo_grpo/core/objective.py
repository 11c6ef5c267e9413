"""`Objective`: a step-level part that sees whole groups, a token-level part for any split of them.

prepare:  rewards, scored logprobs -> advantages [B, T] (+ token weights)      once per step, on whole groups
loss:     current logprobs -> - aggregate( policy term - beta KL term )          per microbatch, on any rows
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Self, TypeVar

from nemo_grpo.core.advantages import GroupAdvantages
from nemo_grpo.core.aggregation import Aggregation, aggregate, group_mean_factors, metric_shares
from nemo_grpo.core.batch import PreparedBatch, TokenBatch, require
from nemo_grpo.core.importance import ImportanceCorrection
from nemo_grpo.core.lazy import Tensor, torch
from nemo_grpo.core.statistics import Groups, percentiles, row_std, token_mean, token_std
from nemo_grpo.core.surrogates import MAX_LOG_RATIO
from nemo_grpo.core.token_weights import step_covariance

T = TypeVar("T")

COVARIANCE_SHARES = {f"p{100 * share:g}": share for share in (0.0001, 0.01, 0.2, 0.5, 0.8, 0.99, 0.9999)}
"""Percentiles of a step's covariances, by name (CW-GRPO Table 1)."""


@dataclass(frozen=True)
class Shaped:
    """A variant's step-level result: advantages, optional token weights [B, T], group advantages.

    Attributes: carried: see `PreparedBatch`.
    """

    advantages: Tensor
    base: GroupAdvantages
    token_weights: Tensor | None = None
    metrics: dict[str, Tensor] = field(default_factory=dict)
    carried: dict[str, float] = field(default_factory=dict)


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
        needs_entropy, needs_reference: which optional tensors of `TokenBatch` are required.
        needs_scores: ``shape`` reads logprobs or entropies from the scoring pass. If it does not, advantages
            follow from rewards alone, and a step's only update can score in its own forward pass.
        whole_groups_per_loss_call: the loss needs exactly one complete group per call (CW-GRPO's
            author_compat).
        learns_without_advantages: ``terms`` has a gradient where the advantage is 0, the KL penalty's aside.
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
    needs_scores: bool = True
    whole_groups_per_loss_call: bool = False
    learns_without_advantages: bool = False

    def prepare(self, batch: TokenBatch, *, seed: int = 0) -> PreparedBatch:
        """Compute everything that spans sequences: once per step, on whole groups, without gradient.

        Args:   batch: every sequence of the step.  seed: the step's, for variants that draw (Clip-Cov, random
                weights).
        Raises: ValueError: an optional tensor is missing that the variant needs, or a reward is not finite.
        """
        if self.needs_entropy and batch.entropies is None:
            raise ValueError(f"{self.name} needs TokenBatch.entropies (full-vocabulary, at scoring time)")
        if self.needs_reference and batch.reference_policy_logprobs is None:
            raise ValueError(f"{self.name} needs TokenBatch.reference_policy_logprobs")
        clean = batch.clean()
        rule = "leave a response out with sample_mask, or give it a finite reward"
        require(clean.rewards.isfinite(), clean.rewards, "rewards", rule)
        scored = replace(clean, next_token_logprobs=clean.prev_logprobs.detach())
        shaped = self.shape(scored, seed)
        by_group = self.aggregation == "group_token_mean"
        return PreparedBatch(
            batch=clean,
            advantages=shaped.advantages,
            group_sizes=shaped.base.sizes,
            token_weights=shaped.token_weights,
            row_factors=group_mean_factors(clean, shaped.base.groups) if by_group else None,
            metrics=step_metrics(scored, shaped.advantages, shaped.base) | shaped.metrics,
            carried=shaped.carried,
        )

    def loss(
        self,
        prepared: PreparedBatch,
        *,
        global_valid_toks: Tensor | float,
        global_valid_seqs: Tensor | float,
        further: FurtherMetrics | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute this part's share of the step's loss; the shares of any split add up to the whole.

        loss = - aggregate( w policy - beta KL ),  w of `correction`, else 1

        Args:    prepared: any rows of the prepared step, with the current policy's logprobs.
                 global_valid_toks, global_valid_seqs: counts over the whole step (`global_counts`).
                 further: (rows, the terms' metrics) -> additional metrics of the same shapes.
        Returns: 0-d loss with gradient; metrics, each a share of a mean over the step (sum them over parts).
        Raises:  ValueError: ``prepared`` has no next_token_logprobs.  TypeError: it is not prepared.
        """
        if not isinstance(prepared, PreparedBatch):
            raise TypeError(f"loss takes what prepare returns, not a {type(prepared).__name__}")
        if prepared.batch.next_token_logprobs is None:
            raise ValueError("next_token_logprobs is missing: give the current policy's to `select`")
        terms, metrics = self.token_terms(prepared)
        counts, beta = prepared.batch.counts, self.kl_penalty
        loss = -aggregate(
            terms.policy if terms.kl is None else torch.sub(terms.policy, terms.kl, alpha=beta),
            counts,
            self.aggregation,
            global_valid_toks=global_valid_toks,
            global_valid_seqs=global_valid_seqs,
            max_response_length=self.max_response_length,
            row_factors=prepared.row_factors,
        )
        if further is not None:
            metrics |= further(prepared, metrics)
        shares = metric_shares(metrics, counts, global_valid_toks, global_valid_seqs)
        return loss, shares | {"loss/total": loss.detach()}

    def folded(self) -> Self:
        """Return the objective of `PreparedBatch.folded`, whose advantages contain the row factors.

        group_token_mean:  sum_i f_i sum_t x_it / N  =  sum_it (f_i x_it) / N
        """
        if self.aggregation != "group_token_mean":
            return self
        return replace(self, aggregation="constant", max_response_length=1)

    def rows_with_gradient(self, advantages: Tensor, mask: Tensor) -> Tensor:
        """Return [B] bool: False for rows that cannot move the policy.

        Without a KL penalty a term w rho A has no gradient where A is 0, as in a group of equal rewards.

        Args: advantages: [B, T].  mask: [B, T], nonzero for tokens that count.
        """
        follows_advantages = self.kl_penalty == 0 and not self.learns_without_advantages
        return (advantages if follows_advantages else mask).any(1)

    def token_terms(self, prepared: PreparedBatch) -> tuple[TokenTerms, dict[str, Tensor]]:
        """Compute the corrected terms of any rows, and every metric that goes with them, [B, T] or [B]."""
        terms = self.terms(prepared)
        metrics = {"loss/policy": -terms.policy.detach(), **terms.metrics}
        if self.correction is not None:
            weights, about = self.correction.weights(prepared.batch)
            terms = replace(terms, policy=weights * terms.policy)
            metrics |= {"loss/policy": -terms.policy.detach()} | about
        if terms.kl is not None:
            reference = prepared.batch.reference_policy_logprobs
            assert reference is not None
            far_below = (reference - prepared.batch.kl_logprobs.detach()).gt_(MAX_LOG_RATIO)
            metrics |= {"kl/reference": terms.kl.detach(), "kl/clamped_fraction": far_below}
        return terms, metrics


def reward_metrics(rewards: Tensor, rewarded: Tensor, groups: Groups) -> dict[str, Tensor]:
    """Compute mean and spread of rewards.

    Args:    rewards: [B]; ignored where ``rewarded`` [B] bool is False.  groups: of the B rows.
    Returns: name -> 0-d float64 tensor. ``reward/group_std`` is the mean over groups with a reward.
    """
    counted = torch.where(rewarded, rewards.double(), 0.0)
    num_groups = (groups.sum(rewarded) > 0).sum().clamp(min=1)
    return {
        "reward/mean": counted.sum() / rewarded.sum().clamp(min=1),
        "reward/std": row_std(counted, rewarded),
        "reward/group_std": groups.std(counted, rewarded).sum() / num_groups,  # GPG Figure 2
    }


def length_metrics(mask: Tensor, sample_mask: Tensor) -> dict[str, Tensor]:
    """Compute mean and maximum of the responses' tokens.

    Args: mask: [B, T] bool, the tokens that count.  sample_mask: [B] bool, the responses in the mean.
    """
    lengths = mask.sum(1)
    return {
        "length/mean": lengths.sum() / sample_mask.sum().clamp(min=1),
        "length/max": lengths.max() if lengths.numel() else lengths.sum(),
    }


OF_ROLLOUTS = ("reward/", "length/")
"""Prefixes of metrics of all responses that were drawn for a step."""


def as_kept(metrics: Mapping[str, T]) -> dict[str, T]:
    """Name ``reward/*`` and ``length/*`` of the responses that dynamic sampling keeps ``kept/*``."""
    return {
        f"kept/{name}" if name.startswith(OF_ROLLOUTS) else name: value for name, value in metrics.items()
    }


def step_metrics(batch: TokenBatch, advantages: Tensor, base: GroupAdvantages) -> dict[str, Tensor]:
    """Compute reward, advantage, length, covariance and mismatch statistics of a whole step.

    Args:    batch: the whole step, clean.
             advantages: [B, T], as the variant shaped them: ``advantage/*``.
             base: the group advantages before any shaping, so that ``covariance/*`` compares variants.
    Returns: name -> 0-d tensor. ``covariance/*`` are percentiles of `step_covariance` (CW-GRPO Table 1);
             ``mismatch/*`` compare the scoring policy with the sampler. They and ``entropy/mean`` are taken
             over the rows that the policy scored.
    """
    mask = batch.mask
    scored = batch.scored_mask
    num_valid = batch.sample_mask.sum().clamp(min=1)
    covariance = step_covariance(batch.prev_logprobs, base.per_token(mask), mask)
    drift = batch.prev_logprobs - batch.generation_logprobs
    bounded = drift.clamp(max=MAX_LOG_RATIO)
    metrics = {
        **reward_metrics(batch.rewards, batch.in_groups, base.groups),
        "groups/valid_fraction": base.has_signal.sum() / num_valid,
        **length_metrics(mask, batch.sample_mask),
        "advantage/mean": token_mean(advantages, mask),
        "advantage/std": token_std(advantages, mask),
        "advantage/abs_max": advantages.abs().max() if advantages.numel() else advantages.sum(),
        "covariance/mean": token_mean(covariance, mask),
        "mismatch/logprob_abs_mean": token_mean(drift.abs(), scored),
        "mismatch/kl": token_mean(bounded.expm1() - bounded, scored),
        "logprob/mean": token_mean(batch.prev_logprobs, mask),
    }
    values = percentiles(covariance.masked_select(mask), tuple(COVARIANCE_SHARES.values()))
    metrics |= {f"covariance/{name}": value for name, value in zip(COVARIANCE_SHARES, values, strict=True)}
    if batch.entropies is not None:
        metrics["entropy/mean"] = token_mean(batch.entropies, scored)
    if batch.reference_policy_logprobs is not None:
        metrics["kl/step_start"] = token_mean(batch.prev_logprobs - batch.reference_policy_logprobs, mask)
    return metrics
