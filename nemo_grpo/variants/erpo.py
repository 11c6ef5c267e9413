"""ERPO: entropy-regulated policy optimisation, token advantages from decision pivots (2603.28204, Eqs. 6-10).

All quantities at scoring time, without gradient, per prompt group g:

    H_it   = full-vocabulary entropy at temperature 1, nats           Eq. 6
    s_it   = beta_progress (logp_prev - logp_ref)                     Eq. 7, implicit progress
    W_it   = sigmoid(gamma z_g(H)_it)                                 Eq. 8, entropy gate
    bucket = min(floor(K t / |o_i|), K - 1),  t = 1..|o_i|
    s~_it  = z of s over the tokens of (g, bucket)                    Eq. 9
    Psi_it = W_it sgn(A_i) s~_it,  then Psi *= sigma_target / (std_active(Psi) + delta)
    A_it   = z_g(A_i + eta Psi_it)                                    Eq. 10
    loss   = GRPO's clipped loss with A_it, k3 KL, token_mean

`active` tokens are those of the step's groups whose rewards differ. All tokens of the other groups get
A_it = 0.

Deviation:
- Eq. 5 prints 1 / sum_i |o_i| inside the expectation over prompts: `aggregation: group_token_mean`.
- Eq. 8 names a "moving mean and standard deviation .. within the current group", Algorithm 1 Norm_G:
  `entropy_statistics: group` takes the group's own, `moving` an exponentially weighted one over the tokens of
  all steps, this one included, kept in the checkpoint. Its momentum, 0.99, is not in the paper.
- The last token has tau = 1, which Algorithm 1's floor(tau K) would put into bucket K: it goes into the last
  bucket.
- K and sigma_target are not stated in the paper: 10 and 1.0 here.
- delta = 1e-4: at the first step policy and reference agree up to float noise of 1e-7, which a smaller delta
  would blow up to a full-size signal. At 1e-4 such noise still gives about a fifth of one; the embedded
  engine computes both the same way and has none.
- std_active(Psi) is over all active tokens of the step. Eq. 10 does not say over which tokens it is; with
  Algorithm 1's one prompt per step there is no difference.
- z-scores with ddof 0, so that Eq. 16 (mean 0, variance 1 over a group's tokens) holds.
"""

import math
from collections.abc import Mapping
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from nemo_grpo.core.batch import TokenBatch
from nemo_grpo.core.lazy import Tensor, torch
from nemo_grpo.core.objective import Shaped
from nemo_grpo.core.random import response_positions
from nemo_grpo.core.statistics import (
    Groups,
    group_zscore,
    moving_moments,
    segment_zscore,
    token_mean,
    token_std,
)
from nemo_grpo.variants.base import RatioConfig


class ERPO(RatioConfig):
    """Entropy-Regulated Policy Optimization. Defaults: the paper's section 5.1."""

    title: ClassVar[str] = "ERPO"
    paper: ClassVar[str] = "Entropy-Regulated Policy Optimization"
    needs_entropy: ClassVar[bool] = True
    compares_with_reference: ClassVar[bool] = True
    reads_scores: ClassVar[bool] = True
    shapes_advantages: ClassVar[bool] = True
    spans_groups: ClassVar[bool] = True
    learns_without_advantages: ClassVar[bool] = False

    variant: Literal["erpo"] = "erpo"
    reference_policy_kl_penalty: float = Field(0.001, ge=0, description="beta, the factor of the KL penalty")
    num_buckets: int = Field(
        10, gt=0, description="K, temporal buckets of a response (not stated in the paper)"
    )
    sigma_target: float = Field(1.0, gt=0, description="std of the shaping signal (not stated in the paper)")
    gamma: float = Field(5.0, ge=0, description="steepness of the entropy gate; 0: the same for every token")
    eta: float = Field(0.2, ge=0, description="share of the shaping signal in the advantage")
    beta_progress: float = Field(0.1, gt=0, description="scale of the implicit progress signal")
    delta: float = Field(1e-4, gt=0, description="added to every standard deviation")
    entropy_statistics: Literal["group", "moving"] = Field(
        "group", description="mean and std of the entropy gate: of the prompt's group, or moving over steps"
    )
    entropy_momentum: float = Field(
        0.99, ge=0, lt=1, description="share of the earlier steps in the moving statistics"
    )

    @model_validator(mode="after")
    def _momentum_has_an_effect(self) -> Self:
        default = type(self).model_fields["entropy_momentum"].default
        if self.entropy_statistics == "group" and self.entropy_momentum != default:
            raise ValueError(
                f"entropy_momentum={self.entropy_momentum} has no effect with entropy_statistics=group; set "
                "entropy_statistics=moving, or leave entropy_momentum out"
            )
        return self

    @property
    def folds(self) -> bool:  # type: ignore[override]
        """True except with a KL penalty under `group_token_mean`; see `weights_kl_by_group`."""
        return not self.weights_kl_by_group

    @property
    def carries_statistics(self) -> bool:
        """True with the moving statistics of the entropy gate."""
        return self.entropy_statistics == "moving"

    def shape(self, batch: TokenBatch, seed: int) -> Shaped:
        """Compute token advantages by Algorithm 1."""
        base = self.group_advantages(batch)
        advantages = base.per_token(batch.mask)
        active = batch.mask & base.has_signal[:, None]
        carried = self.moving_statistics(batch)
        # Eq. 8, 9 and the sign of the advantage.
        gate = self.entropy_gate(batch, base.groups, carried)
        progress = self.bucketed_progress(batch, base.groups)
        psi = gate * advantages.sign() * progress
        # Eq. 10: psi to the std sigma_target, then the sum standardised per group.
        scale = self.sigma_target / (token_std(psi, active) + self.delta)
        psi = psi * scale.to(psi.dtype)
        shaped = group_zscore(advantages + self.eta * psi, active, base.groups, self.delta)
        metrics = {
            "erpo/gate_mean": token_mean(gate, active),
            "erpo/psi_abs_mean": token_mean(psi.abs(), active),
        }
        return Shaped(shaped, base, metrics=metrics, carried=carried)

    def moving_statistics(self, batch: TokenBatch) -> dict[str, float]:
        """Update mean and variance of the entropy over steps; empty for the group's own statistics."""
        if not self.carries_statistics:
            return {}
        assert batch.entropies is not None
        return moving_moments(batch.entropies, batch.mask, batch.carried, self.entropy_momentum)

    def entropy_gate(self, batch: TokenBatch, groups: Groups, moving: Mapping[str, float]) -> Tensor:
        """Compute W_it in (0, 1), [B, T]: near 1 where the policy was uncertain."""
        assert batch.entropies is not None
        if moving:
            std = math.sqrt(moving["variance"])
            # gamma first: another order of the operations rounds otherwise.
            return torch.sigmoid(self.gamma * (batch.entropies - moving["mean"]) / (std + self.delta))
        zscore = group_zscore(batch.entropies, batch.mask, groups, self.delta)
        return torch.sigmoid(self.gamma * zscore)

    def bucketed_progress(self, batch: TokenBatch, groups: Groups) -> Tensor:
        """Compute s~_it, [B, T]: gain over the reference, standardised per group and bucket."""
        assert batch.reference_policy_logprobs is not None
        progress = self.beta_progress * (batch.prev_logprobs - batch.reference_policy_logprobs)
        # One number per pair (group, bucket).
        segments = groups.index[:, None] * self.num_buckets + self.buckets(batch.mask)
        num_segments = groups.num_groups * self.num_buckets
        return segment_zscore(progress, batch.mask, segments, num_segments, self.delta)

    def buckets(self, mask: Tensor) -> Tensor:
        """Find each token's temporal bucket floor(K t / |o_i|): [B, T] int64 in [0, K)."""
        lengths = mask.sum(1, keepdim=True).clamp(min=1)
        buckets = self.num_buckets * response_positions(mask) // lengths
        # The last token, t = |o_i|, would be in bucket K.
        return buckets.clamp(max=self.num_buckets - 1)
