"""GPG: group policy gradient, the plain objective without a surrogate (2504.02546, Eqs. 5-8, Algorithm 1).

    A_i   = (r_i - mean_g r) / F_norm             F_norm = 1 (default) | std_g + eps | std_batch + eps
    alpha = B / (B - M) | 1                       M = sequences in groups whose rewards are all equal
    loss  = - alpha token_mean(logp A)            no ratio, no clip
            + beta token_mean(KL)                 section 3.4; beta is 0 by default: no reference model

alpha is one number per step over the global batch, so it is folded into the advantages before any split.
While fewer than `valid_fraction_threshold` of the groups carry signal, more prompts are drawn:
`core.resampling`, steered by `grpo.use_dynamic_sampling`.

Deviation:
- Eq. 5 prints the loss but calls it the objective.
- A step without signal in any group has loss 0 and is counted (`gpg/no_signal`); Eq. 7 would divide by zero.
- Algorithm 1 draws until the threshold is passed. Here, as in the released code, prompts are drawn at most 20
  more times, and groups without signal then fill the step.
- Eq. 5 prints 1 / sum_i |o_i| inside the expectation over prompts, which is `aggregation: group_token_mean`.
  The default is token_mean, as in the authors' code for language; their code for vision has sequence_mean.
"""

from typing import ClassVar, Literal

from pydantic import Field

from nemo_grpo.core.advantages import RewardNormalization, group_advantages
from nemo_grpo.core.batch import PreparedBatch, TokenBatch
from nemo_grpo.core.objective import Shaped, TokenTerms
from nemo_grpo.core.surrogates import importance_ratio, reinforce
from nemo_grpo.variants.base import KLConfig, ratio_metrics


class GPG(KLConfig):
    """Group Policy Gradient."""

    title: ClassVar[str] = "GPG"
    paper: ClassVar[str] = "GPG (2504.02546)"
    sampling_keys: ClassVar[tuple[str, ...]] = ("valid_fraction_threshold", "max_resample_attempts")
    without_dynamic_sampling: ClassVar[str | None] = "no threshold on valid groups"
    reads_scores: ClassVar[bool] = False
    learns_without_advantages: ClassVar[bool] = False

    variant: Literal["gpg"] = "gpg"
    reward_normalization: RewardNormalization = Field(
        "none", description="F_norm: 1, the group's std, the batch's std"
    )
    use_alpha: bool = Field(True, description="correct the gradient by alpha = B / (B - M) (AGE); false: 1")
    valid_fraction_threshold: float = Field(
        0.6, ge=0, le=1, description="beta_th, minimum share of groups with signal"
    )
    max_resample_attempts: int = Field(
        20, ge=0, description="extra draws of prompts before the step trains on what it has"
    )

    @property
    def shapes_advantages(self) -> bool:  # type: ignore[override]
        """True with alpha, a factor of the group advantages."""
        return self.use_alpha

    @property
    def spans_groups(self) -> bool:  # type: ignore[override]
        """True if alpha, which counts the step's groups, or the std of the batch is in the advantages."""
        return self.use_alpha or self.reward_normalization == "batch"

    @property
    def folds(self) -> bool:  # type: ignore[override]
        """True except with a KL penalty under `group_token_mean`; see `weights_kl_by_group`."""
        return not self.weights_kl_by_group

    def resampling(self, max_draws: int) -> tuple[float, int]:
        """Return beta_th, and the number of draws with the extra ones."""
        return self.valid_fraction_threshold, 1 + self.max_resample_attempts

    def shape(self, batch: TokenBatch, seed: int) -> Shaped:
        """Multiply the centred rewards by alpha."""
        base = group_advantages(batch, normalization=self.reward_normalization, eps=self.advantage_eps)
        num_sequences = batch.sample_mask.sum()  # B
        num_valid = base.has_signal.sum()  # B - M
        alpha = num_sequences.double() / num_valid.clamp(min=1)
        if not self.use_alpha:
            alpha = alpha.new_ones(())
        metrics = {"gpg/alpha": alpha, "gpg/no_signal": (num_valid == 0).to(alpha.dtype)}
        advantages = base.per_token(batch.mask)
        return Shaped(advantages * alpha.to(advantages.dtype), base, metrics=metrics)

    def terms(self, prepared: PreparedBatch) -> TokenTerms:
        """Compute logp A, and the KL term if penalised."""
        batch = prepared.batch
        # For the metrics alone: GPG's objective has no ratio.
        ratio = importance_ratio(batch.next_token_logprobs.detach(), batch.prev_logprobs)
        policy = reinforce(batch.next_token_logprobs, prepared.advantages)
        return TokenTerms(policy, self.kl_term(batch), ratio_metrics(batch, ratio))
