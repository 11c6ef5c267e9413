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
    """A variant's step-level result.

    Attributes:
        advantages: [B, T]; exactly 0 where the mask is False.
        base: the group advantages before any shaping.
        token_weights: [B, T] that the token terms need in addition, or None.
        metrics: 0-d tensors.
        carried: see `PreparedBatch`.
    """

    advantages: Tensor
    base: GroupAdvantages
    token_weights: Tensor | None = None
    metrics: dict[str, Tensor] = field(default_factory=dict)
    carried: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenTerms:
    """Per-token objective.

    Attributes:
        policy: [B, T], to be maximised.
        kl: [B, T], to be subtracted with the factor beta; None: no penalty.
        metrics: [B, T], to be averaged over tokens, or [B], to be averaged over sequences; no gradient.
    """

    policy: Tensor
    kl: Tensor | None = None
    metrics: dict[str, Tensor] = field(default_factory=dict)


Shape = Callable[[TokenBatch, int], Shaped]
Terms = Callable[[PreparedBatch], TokenTerms]
FurtherMetrics = Callable[[PreparedBatch, "dict[str, Tensor]"], "dict[str, Tensor]"]


@dataclass(frozen=True)
class Objective:
    """An algorithm: the function `shape` of whole steps, the function `terms` of any rows, and a reduction.

    Attributes:
        name: the variant's name.
        shape: (whole clean step, seed) -> `Shaped`.
        terms: (clean rows) -> `TokenTerms`.
        aggregation: see `aggregate`.
        max_response_length: see `aggregate`.
        kl_penalty: beta, the factor of the KL term.
        correction: reweighting of the policy term by policy over sampler, or None.
        needs_entropy: ``shape`` reads `TokenBatch.entropies`.
        needs_reference: ``shape`` or ``terms`` read `TokenBatch.reference_policy_logprobs`.
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

        Args:
            batch: every sequence of the step.
            seed: seed of the step, for variants with random choices (Clip-Cov, TR-GRPO's random weights).
        Raises: ValueError: an optional tensor is missing that the variant needs, or a reward is not finite.
        """
        if self.needs_entropy and batch.entropies is None:
            raise ValueError(f"{self.name} needs TokenBatch.entropies (full-vocabulary, at scoring time)")
        if self.needs_reference and batch.reference_policy_logprobs is None:
            raise ValueError(f"{self.name} needs TokenBatch.reference_policy_logprobs")
        clean = batch.clean()
        rule = "leave a response out with sample_mask, or give it a finite reward"
        require(clean.rewards.isfinite(), clean.rewards, "rewards", rule)
        # A variant whose equations name the current policy's logprobs gets those of the scoring pass here.
        scored = replace(clean, next_token_logprobs=clean.prev_logprobs.detach())
        shaped = self.shape(scored, seed)
        row_factors = None
        if self.aggregation == "group_token_mean":
            row_factors = group_mean_factors(clean, shaped.base.groups)
        return PreparedBatch(
            batch=clean,
            advantages=shaped.advantages,
            group_sizes=shaped.base.sizes,
            token_weights=shaped.token_weights,
            row_factors=row_factors,
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

        Args:
            prepared: any rows of the prepared step, with the current policy's logprobs.
            global_valid_toks: tokens that count in the whole step (`global_counts`).
            global_valid_seqs: sequences that count in the whole step.
            further: (rows, the terms' metrics) -> additional metrics of the same shapes.
        Returns: 0-d loss with gradient; metrics, each a share of a mean over the step (sum them over parts).
        Raises:  ValueError: ``prepared`` has no next_token_logprobs.  TypeError: it is not prepared.
        """
        if not isinstance(prepared, PreparedBatch):
            raise TypeError(f"loss takes what prepare returns, not a {type(prepared).__name__}")
        if prepared.batch.next_token_logprobs is None:
            raise ValueError("next_token_logprobs is missing: give the current policy's to `select`")
        terms, metrics = self.token_terms(prepared)
        counts = prepared.batch.counts
        objective = terms.policy
        if terms.kl is not None:
            # policy - beta KL as one operation, so that the product is not rounded before the difference.
            objective = torch.sub(terms.policy, terms.kl, alpha=self.kl_penalty)
        loss = -aggregate(
            objective,
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

        The policy term is w rho A. Where A is 0, as in a group of equal rewards, only a KL penalty has a
        gradient.

        Args:
            advantages: [B, T].
            mask: [B, T], nonzero for tokens that count.
        """
        if self.kl_penalty == 0 and not self.learns_without_advantages:
            return advantages.any(1)
        return mask.any(1)

    def token_terms(self, prepared: PreparedBatch) -> tuple[TokenTerms, dict[str, Tensor]]:
        """Compute the corrected terms of any rows, and every metric that goes with them, [B, T] or [B]."""
        terms = self.terms(prepared)
        metrics = {"loss/policy": -terms.policy.detach(), **terms.metrics}
        if self.correction is not None:
            weights, correction_metrics = self.correction.weights(prepared.batch)
            terms = replace(terms, policy=weights * terms.policy)
            metrics |= {"loss/policy": -terms.policy.detach()} | correction_metrics
        if terms.kl is not None:
            reference = prepared.batch.reference_policy_logprobs
            assert reference is not None
            log_ratio = reference - prepared.batch.kl_logprobs.detach()
            is_clamped = (log_ratio > MAX_LOG_RATIO).to(log_ratio.dtype)
            metrics |= {"kl/reference": terms.kl.detach(), "kl/clamped_fraction": is_clamped}
        return terms, metrics


def reward_metrics(rewards: Tensor, rewarded: Tensor, groups: Groups) -> dict[str, Tensor]:
    """Compute the mean of the rewards, their standard deviation, and the mean of the groups' own.

    Args:
        rewards: [B].
        rewarded: [B] bool; False where the reward does not count.
        groups: the groups of the B rows.
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
    """Compute the mean and the largest number of tokens of a response.

    Args:
        mask: [B, T] bool; True for the tokens that count.
        sample_mask: [B] bool; True for the responses in the mean.
    """
    lengths = mask.sum(1)
    return {
        "length/mean": lengths.sum() / sample_mask.sum().clamp(min=1),
        "length/max": _largest(lengths),
    }


def _largest(x: Tensor) -> Tensor:
    """Return the largest element, 0-d; 0 if there is none."""
    # torch's max() refuses an empty tensor, which a step without rows or columns gives.
    return x.max() if x.numel() else x.new_zeros(())


ROLLOUT_PREFIXES = ("reward/", "length/")
"""Prefixes of metrics of all responses that were sampled for a step."""


def as_kept(metrics: Mapping[str, T]) -> dict[str, T]:
    """Rename ``reward/*`` and ``length/*`` to ``kept/*``, for the responses that dynamic sampling keeps."""
    renamed = {}
    for name, value in metrics.items():
        new_name = f"kept/{name}" if name.startswith(ROLLOUT_PREFIXES) else name
        renamed[new_name] = value
    return renamed


def step_metrics(batch: TokenBatch, advantages: Tensor, base: GroupAdvantages) -> dict[str, Tensor]:
    """Compute reward, advantage, length, covariance and mismatch statistics of a whole step.

    Args:
        batch: the whole step, clean.
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
    sampler_gap = batch.prev_logprobs - batch.generation_logprobs
    bounded = sampler_gap.clamp(max=MAX_LOG_RATIO)
    metrics = {
        **reward_metrics(batch.rewards, batch.in_groups, base.groups),
        "groups/valid_fraction": base.has_signal.sum() / num_valid,
        **length_metrics(mask, batch.sample_mask),
        "advantage/mean": token_mean(advantages, mask),
        "advantage/std": token_std(advantages, mask),
        "advantage/abs_max": _largest(advantages.abs()),
        "covariance/mean": token_mean(covariance, mask),
        "mismatch/logprob_abs_mean": token_mean(sampler_gap.abs(), scored),
        "mismatch/kl": token_mean(bounded.expm1() - bounded, scored),
        "logprob/mean": token_mean(batch.prev_logprobs, mask),
    }
    # Percentiles need the values of the counting tokens alone: the padding's zeros would shift every rank.
    values = percentiles(covariance.masked_select(mask), tuple(COVARIANCE_SHARES.values()))
    metrics |= {f"covariance/{name}": value for name, value in zip(COVARIANCE_SHARES, values, strict=True)}
    if batch.entropies is not None:
        metrics["entropy/mean"] = token_mean(batch.entropies, scored)
    if batch.reference_policy_logprobs is not None:
        metrics["kl/step_start"] = token_mean(batch.prev_logprobs - batch.reference_policy_logprobs, mask)
    return metrics
