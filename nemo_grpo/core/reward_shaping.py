"""Adjustments of a sequence's reward by its length."""

from nemo_grpo.core.lazy import Tensor


def overlong_penalty(
    lengths: Tensor, *, max_response_length: int, buffer_length: int, penalty: float
) -> Tensor:
    """DAPO's soft penalty: grows linearly over the last ``buffer_length`` tokens before the limit.

    Implements DAPO (2503.14476) Eq. 13:  penalty (l - (L_max - L_b)) / L_b for l > L_max - L_b, at most
    penalty

    Args:    lengths: [B], response tokens.  penalty: >= 0, subtracted in full at L_max and beyond.
    Returns: [B] float32, <= 0: what to add to the rewards.
    """
    excess = (lengths - (max_response_length - buffer_length)).float() / buffer_length
    return -penalty * excess.clamp(0.0, 1.0)
