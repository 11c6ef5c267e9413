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

    Attributes: truncation: None: w is not bounded.  lower, upper: bounds of w.
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
        drift = batch.prev_logprobs - batch.generation_logprobs  # clean: 0 off the mask
        log_w = drift.sum(1, keepdim=True).expand_as(drift) if self.sequence_level else drift
        w = torch.nan_to_num(torch.exp(log_w), nan=0.0, posinf=0.0)
        if self.truncation is None:
            return w, {"importance/weight": w}
        if self.truncation == "seq-mask-tis":
            num_tokens = batch.mask.sum(1).clamp(min=1)
            mean = torch.nan_to_num(drift, nan=0.0, posinf=0.0, neginf=0.0).sum(1) / num_tokens
            outside = self._is_outside(torch.exp(mean))
            w = torch.where(outside[:, None], 0.0, w)
        else:
            outside = self._is_outside(w)
            w = w.clamp(self.lower, self.upper) if self.truncation == "tis" else torch.where(outside, 0.0, w)
        return w, {"importance/weight": w, "importance/outside": outside.to(w.dtype)}

    def _is_outside(self, weights: Tensor) -> Tensor:
        return (weights < self.lower) | (weights > self.upper)
