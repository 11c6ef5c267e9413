"""CISPO: the importance weight is clipped, not the update, so every token keeps its gradient (2506.13585).

    A_i  = (r_i - mean_g r) / (std_g r + eps)                                    Eq. 2
    w_it = clip(rho_it, 1 - ratio_clip_min, 1 + ratio_clip_max)                  Eq. 5, no gradient
    loss = - token_mean(w A logp)                                                Eq. 4

The clip acts only with several updates per step: in the first one w is 1, and the gradient is GRPO's.

Deviation:
- The paper sets no lower bound, `ratio_clip_min: 1.0`, and tunes the upper one without stating it: 5.0, as in
  NeMo-RL's recipe. TRL's `epsilon_high` bounds the weight itself, so it is 1 + ratio_clip_max.
- Eq. 4 prints 1 / sum_i |o_i| inside the expectation over prompts: `aggregation: group_token_mean`; the
  default is token_mean, as in NeMo-RL and TRL.
- The dynamic sampling and length penalty that the paper takes from DAPO are keys of `grpo`, off by default.
"""

from typing import ClassVar, Literal

from pydantic import Field

from nemo_grpo.core.batch import PreparedBatch
from nemo_grpo.core.objective import TokenTerms
from nemo_grpo.core.surrogates import reinforce
from nemo_grpo.variants.base import TokenRatioConfig, ratio_metrics


class CISPO(TokenRatioConfig):
    """Clipped IS-weight Policy Optimization."""

    title: ClassVar[str] = "CISPO"
    paper: ClassVar[str] = "MiniMax-M1 (2506.13585)"
    stock_switch: ClassVar[str | None] = "use_cispo"
    reads_scores: ClassVar[bool] = False
    shapes_advantages: ClassVar[bool] = False
    spans_groups: ClassVar[bool] = False
    learns_without_advantages: ClassVar[bool] = False

    variant: Literal["cispo"] = "cispo"
    ratio_clip_min: float = Field(1.0, ge=0, description="lower bound of the weight, below 1; 1: none")
    ratio_clip_max: float = Field(5.0, ge=0, description="upper bound of the weight, above 1")
    # Keys of the other ratio variants. A resolved recipe holds every key, and a recipe inherits those of the
    # recipe that it builds on, so they are accepted as long as they are off.
    ratio_clip_c: None = Field(None, description="not in CISPO, whose clip leaves every gradient")
    sequence_level_importance_ratios: Literal[False] = Field(
        False, description="not in CISPO, whose weights are of tokens"
    )

    @property
    def folds(self) -> bool:  # type: ignore[override]
        """True except with a KL penalty under `group_token_mean`; see `weights_kl_by_group`."""
        return not self.weights_kl_by_group

    def terms(self, prepared: PreparedBatch) -> TokenTerms:
        """Compute the weighted policy gradient, and the KL term if penalised."""
        batch = prepared.batch
        # Detached, so that a token outside the bounds still has the gradient of its logprob.
        ratio = self.ratio(batch).detach()
        weights = ratio.clamp(1 - self.ratio_clip_min, 1 + self.ratio_clip_max)
        policy = weights * reinforce(batch.next_token_logprobs, prepared.advantages)
        is_clipped = (weights != ratio).to(ratio.dtype)
        metrics = {"ratio/clip_fraction": is_clipped}
        return TokenTerms(policy, self.kl_term(batch), metrics | ratio_metrics(batch, ratio))
