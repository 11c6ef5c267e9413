"""CW-GRPO: covariance-aware GRPO with Gaussian-kernel advantage reweighting (2605.11538, section 2.3).

    c_it  = (logp_it - mean_t logp_i)(A_i - mean_g A)       scoring-time policy, no gradient
    w_it  = exp(-c_it^2 / (2 sigma_g^2))                    sigma_g = std of c over the group's tokens, ddof 0
    w~_it = w_it N_g / sum_g w                              so that the group's weights add up to its tokens
    term  = rho_it (w~_it A_i) - beta k3_it                 no clip, KL outside the weight
    loss  = - sequence_mean(term)

Deviation:
- The paper writes c with the current policy; here it is the one that scored the rollout, so that w is fixed
  once per step. In a step's first update, the paper's only one, the two are the same.
- The paper's mean of log pi is "computed over responses"; the released code that fits the paper centres each
  response on its own mean: `logprob_centering: response`. `group` centres on the group's tokens and can flip
  a group's sign.
- beta is not in the paper's Table 5; the code base it builds on trains with 0.04.
- `author_compat: true` is the released loss instead: the normaliser counts responses padded to the group's
  longest (mean weight > 1) and the gradient flows through w. Its sums are over the group, so every loss call
  must hold exactly one whole group. (The released trainer also scores at temperature 1 whatever the sampling
  temperature; here both use the same one.)
"""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from nemo_grpo.core.aggregation import Aggregation
from nemo_grpo.core.batch import PreparedBatch, TokenBatch
from nemo_grpo.core.lazy import Tensor, torch
from nemo_grpo.core.objective import Shaped, TokenTerms
from nemo_grpo.core.statistics import row_centred, token_mean
from nemo_grpo.core.surrogates import importance_ratio
from nemo_grpo.core.token_weights import Centring, Scope, gaussian_kernel_weights, group_covariance
from nemo_grpo.variants.base import RatioConfig, ratio_metrics


class CWGRPO(RatioConfig):
    """Covariance-weighted GRPO."""

    title: ClassVar[str] = "CW-GRPO"
    paper: ClassVar[str] = "Taming Extreme Tokens (2605.11538)"
    whole_groups_key: ClassVar[str | None] = "author_compat"
    learns_without_advantages: ClassVar[bool] = False

    variant: Literal["cw_grpo"] = "cw_grpo"
    aggregation: Aggregation = Field("sequence_mean", description="1/G sum_i 1/|o_i| sum_t, as printed")
    advantage_eps: float = Field(
        1e-4, ge=0, description="added to the standard deviation of rewards (open-rs)"
    )
    ratio_clip_min: float | None = Field(
        None, ge=0, description="lower clip distance from 1; the paper has no clip"
    )
    ratio_clip_max: float | None = Field(
        None, ge=0, description="upper clip distance from 1; the paper has no clip"
    )
    reference_policy_kl_penalty: float = Field(
        0.04, ge=0, description="beta; not in the paper, 0.04 in its code base"
    )
    logprob_centering: Centring = Field(
        "response", description="what logp is centred on: mean of the response, of the group, or nothing"
    )
    scope: Scope = Field(
        "group", description="sigma and normaliser over the prompt's group, or the whole batch"
    )
    author_compat: bool = Field(
        False, description="the released code: padded normaliser, gradient through the weight"
    )

    @model_validator(mode="after")
    def _author_code_has_no_options(self) -> Self:
        changed = {}
        for name in ("logprob_centering", "scope", "ratio_clip_min"):
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:
                changed[name] = value
        if self.author_compat and changed:
            raise ValueError(
                f"author_compat=true is the released code, which has no {changed}; remove one of the two"
            )
        return self

    @property
    def reads_scores(self) -> bool:  # type: ignore[override]
        """True if the scored logprobs give the weights; in the released code the current policy's do."""
        return not self.author_compat

    @property
    def shapes_advantages(self) -> bool:  # type: ignore[override]
        """True if the weights multiply the advantages; the released code's multiply the terms."""
        return not self.author_compat

    @property
    def spans_groups(self) -> bool:  # type: ignore[override]
        """True if sigma and the normaliser are those of the whole batch."""
        return self.scope == "batch"

    @property
    def folds(self) -> bool:  # type: ignore[override]
        """True except with a KL penalty under `group_token_mean`; see `weights_kl_by_group`.

        The released code computes its weights from the advantages. With `group_token_mean`, folding would
        change the advantages, and so the weights.
        """
        if self.author_compat and self.aggregation == "group_token_mean":
            return False
        return not self.weights_kl_by_group

    def shape(self, batch: TokenBatch, seed: int) -> Shaped:
        """Multiply the advantages by the kernel weights.

        The weights are >= 0, so weighting before the clip gives the same as weighting after it.
        """
        base = self.group_advantages(batch)
        advantages = base.per_token(batch.mask)
        if self.author_compat:
            return Shaped(advantages, base)
        covariance = group_covariance(
            batch.prev_logprobs, base.values, batch, base.groups, self.logprob_centering
        )
        weights = gaussian_kernel_weights(covariance, batch.mask, base.groups, self.scope)
        metrics = {
            "cw_grpo/weight_mean": token_mean(weights, batch.mask),
            "cw_grpo/weight_below_half": token_mean((weights < 0.5).to(weights.dtype), batch.mask),
        }
        return Shaped(advantages * weights, base, metrics=metrics)

    def terms(self, prepared: PreparedBatch) -> TokenTerms:
        """Compute GRPO's terms, whose advantages are weighted already.

        With author_compat the weights come from the current policy and have a gradient.
        """
        if not self.author_compat:
            return super().terms(prepared)
        batch = prepared.batch
        _require_one_whole_group(prepared)
        weights = _author_weights(batch.next_token_logprobs, prepared.advantages, batch.mask)
        ratio = importance_ratio(batch.next_token_logprobs, batch.prev_logprobs)
        policy = ratio * weights * prepared.advantages
        metrics = {"cw_grpo/weight_mean": weights.detach()} | ratio_metrics(batch, ratio)
        return TokenTerms(policy, self.kl_term(batch), metrics)


def _require_one_whole_group(prepared: PreparedBatch) -> None:
    ids = prepared.batch.group_ids
    num_sequences = int(prepared.batch.sample_mask.sum())
    # Slices instead of [0], because a call without rows has no first row.
    has_several_groups = bool((ids != ids[:1]).any())
    group_size = int(prepared.group_sizes[:1].sum())
    is_whole = num_sequences == group_size
    if has_several_groups or not is_whole:
        raise ValueError(
            f"author_compat needs exactly one whole group per loss call, got {num_sequences} sequences of "
            f"{ids.unique().numel()} group(s); make the microbatch num_generations_per_prompt rows, unpacked"
        )


def _author_weights(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Compute the released code's weights of one whole group, [B, T], with gradient."""
    if not mask.any():  # nothing trains in this group: no sum of weights to divide by
        return torch.zeros_like(logprobs)
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    centred = row_centred(logprobs, mask).to(logprobs.dtype)
    # A_i at each token. Its mean over a whole group is 0, so it needs no centring.
    response_advantages = torch.where(mask, advantages.sum(1, keepdim=True) / lengths, 0.0)
    covariance = centred * response_advantages
    # The released code adds 1e-8.
    sigma = covariance[mask].std(unbiased=False) + 1e-8
    w = torch.where(mask, torch.exp(-covariance.square() / (2 * sigma.square())), 0.0)
    # Responses padded to the longest of the group count in full, so the mean weight exceeds 1.
    num_padded_tokens = mask.shape[0] * mask.sum(1).max()
    return w * num_padded_tokens / w.sum()
