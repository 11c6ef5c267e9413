"""Correction for the gap between the sampler and the policy that scored its rollout, without gradient.

The two differ by kernels, precision (FP8 or BF16 rollouts) and, with asynchronous rollouts, by updates.

    w_it = pi_prev / pi_gen                           token level
    w_i  = prod_t pi_prev / pi_gen                    sequence level, at each of the response's tokens
    tis            w clamped to [lower, upper]
    icepop         0 where w is outside [lower, upper]
    seq-mask-tis   0 for the whole response where its geometric mean of w_it is outside; else w_it untouched
"""

from dataclasses import dataclass
from typing import Literal

from nemo_grpo.core.batch import TokenBatch
from nemo_grpo.core.lazy import Tensor, torch

Truncation = Literal["tis", "icepop", "seq-mask-tis"]


@dataclass(frozen=True)
class ImportanceCorrection:
    """Reweighting of the policy term by policy over sampler.

    Attributes:
        truncation: how the weight is bounded; None: not at all.
        lower: smallest weight that is left as it is.
        upper: largest weight that is left as it is.
        sequence_level: one weight per response.
    """

    truncation: Truncation | None = None
    lower: float = 0.0
    upper: float = float("inf")
    sequence_level: bool = False

    def weights(self, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the weights of the policy term, and metrics of them.

        Args:    batch: clean rows.
        Returns: [B, T], 0 where w is not finite; metrics, per token [B, T] or per response [B].
        """
        log_ratio = batch.prev_logprobs - batch.generation_logprobs  # clean: 0 off the mask
        if self.sequence_level:
            log_w = log_ratio.sum(1, keepdim=True).expand_as(log_ratio)
        else:
            log_w = log_ratio
        # A sampler's logprob of -inf would give an infinite weight, or NaN; 0 leaves the token out instead.
        w = torch.nan_to_num(torch.exp(log_w), nan=0.0, posinf=0.0)
        if self.truncation is None:
            return w, {"importance/weight": w}
        if self.truncation == "seq-mask-tis":
            is_outside = self._is_outside(_geometric_mean(log_ratio, batch.mask))
            w = torch.where(is_outside[:, None], 0.0, w)
        elif self.truncation == "icepop":
            is_outside = self._is_outside(w)
            w = torch.where(is_outside, 0.0, w)
        else:
            is_outside = self._is_outside(w)
            w = w.clamp(self.lower, self.upper)
        return w, {"importance/weight": w, "importance/outside": is_outside.to(w.dtype)}

    def _is_outside(self, weights: Tensor) -> Tensor:
        return (weights < self.lower) | (weights > self.upper)


def _geometric_mean(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Compute the geometric mean of each response's ratios: [B, T] -> [B]."""
    finite = torch.nan_to_num(log_ratio, nan=0.0, posinf=0.0, neginf=0.0)
    num_tokens = mask.sum(1).clamp(min=1)
    return torch.exp(finite.sum(1) / num_tokens)
