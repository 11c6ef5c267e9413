"""DPPO: a token is masked by how much probability moved, not by its ratio (2602.04879).

    A_i  = r_i - mean_g r
    r_it = pi / mu                                                    mu: the sampler
    D_it = |pi - mu|                                                  binary total variation
    M_it = 0 where D > divergence_threshold and (A > 0 and pi > mu, or A < 0 and pi < mu), else 1
    loss = - token_mean(M sg(min(r, ratio_max)) A logp)

The mask stops updates that leave the trust region, never one that returns to it. In ratios it allows
|r - 1| <= threshold / mu: rare tokens move freely where a clip stops them, likely ones less.

Ratio and mask compare with the sampler, not with the scored policy (section 5.2). The loss therefore needs
neither a correction for the gap between the two nor a scoring pass.

Deviation:
- The paper prints r A, whose gradient is that of sg(r) A logp, as the released code has it with its bound.
- Threshold 0.2 and bound 5 are as other implementations quote the paper (appendices C.1 and E); thresholds
  from 0.1 to 0.2 work. The authors' script in verl has 0.15, no bound and Dr.GRPO's `aggregation: constant`;
  the bound of the released code is 10. The KL and top-K divergences are not implemented.
- prime-rl's `default` loss has this mask without the bound and adds a squared log-ratio; its `ipo` masks
  whatever the advantage's sign.
"""

from typing import ClassVar, Literal

from pydantic import Field

from nemo_grpo.core.batch import PreparedBatch, TokenBatch
from nemo_grpo.core.lazy import Tensor
from nemo_grpo.core.objective import TokenTerms
from nemo_grpo.core.surrogates import importance_ratio, reinforce
from nemo_grpo.variants.base import TokenRatioConfig, ratio_metrics


class DPPO(TokenRatioConfig):
    """Divergence Proximal Policy Optimization, binary total variation."""

    title: ClassVar[str] = "DPPO"
    paper: ClassVar[str] = "DPPO (2602.04879)"
    reads_scores: ClassVar[bool] = False
    shapes_advantages: ClassVar[bool] = False
    spans_groups: ClassVar[bool] = False
    learns_without_advantages: ClassVar[bool] = False

    variant: Literal["dppo"] = "dppo"
    # Keys of the other ratio variants. A resolved recipe holds every key, and a recipe inherits those of the
    # recipe that it builds on, so they are accepted as long as they are off.
    ratio_clip_min: None = Field(None, description="not in DPPO, whose mask replaces the clip")
    ratio_clip_max: None = Field(None, description="not in DPPO, whose mask replaces the clip")
    ratio_clip_c: None = Field(None, description="not in DPPO; ratio_max bounds the weight")
    sequence_level_importance_ratios: Literal[False] = Field(
        False, description="not in DPPO, whose weights are of tokens"
    )

    divergence_threshold: float = Field(
        0.2, ge=0, le=1, description="delta, how far a token's probability may move from the sampler's"
    )
    ratio_max: float | None = Field(
        5.0, gt=0, description="upper bound of the weight pi over sampler, which has no gradient; null: none"
    )
    normalize_rewards: bool = Field(False, description="divide by the group's standard deviation (ddof 1)")
    # NeMo-RL's asynchronous trainer asks for this key. A second weight on top of the ratio would be wrong.
    use_importance_sampling_correction: Literal[True] = Field(
        True, description="the ratio is to the sampler, which is the correction; always true"
    )
    truncated_importance_sampling_type: None = Field(
        None, description="not in DPPO; ratio_max bounds the weight"
    )
    truncated_importance_sampling_ratio: None = Field(
        None, description="not in DPPO; ratio_max bounds the weight"
    )
    truncated_importance_sampling_ratio_min: None = Field(
        None, description="not in DPPO; ratio_max bounds the weight"
    )
    force_on_policy_ratio: bool = Field(
        False,
        description="leave out the scoring pass, which DPPO does not read; one update per step (NeMo-RL)",
    )

    @property
    def folds(self) -> bool:  # type: ignore[override]
        """True except with a KL penalty under `group_token_mean`; see `weights_kl_by_group`."""
        return not self.weights_kl_by_group

    def importance_correction(self) -> None:
        """Return None: the ratio corrects already."""

    def ratio(self, batch: TokenBatch) -> Tensor:
        """Compute pi over the sampler, [B, T]."""
        return importance_ratio(batch.next_token_logprobs, batch.generation_logprobs)

    def terms(self, prepared: PreparedBatch) -> TokenTerms:
        """Compute the masked, weighted policy gradient, and the KL term if penalised."""
        batch = prepared.batch
        advantages = prepared.advantages
        # Detached: the gradient is that of the logprob, as in the released code.
        ratio = self.ratio(batch).detach()
        difference = batch.next_token_logprobs.detach().exp() - batch.generation_logprobs.exp()
        rises_too_far = (advantages > 0) & (difference > self.divergence_threshold)
        falls_too_far = (advantages < 0) & (difference < -self.divergence_threshold)
        is_masked = rises_too_far | falls_too_far
        weights = ratio if self.ratio_max is None else ratio.clamp(max=self.ratio_max)
        weights = weights.masked_fill(is_masked, 0.0)
        policy = weights * reinforce(batch.next_token_logprobs, advantages)
        metrics = {
            "dppo/divergence": difference.abs(),
            "dppo/masked_fraction": is_masked.to(ratio.dtype),
        }
        return TokenTerms(policy, self.kl_term(batch), metrics | ratio_metrics(batch, ratio))
