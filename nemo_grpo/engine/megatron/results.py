"""Results of a policy: scores of a step's tokens, and the outcome of an update."""

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor


class Scores(NamedTuple):
    """The policy's scores of a step's tokens.

    Attributes: logprobs: [B, S - 1] float32, nats, at the temperature of sampling; 0 in the padding, and if
                    sequences are packed in the prompts.
                entropies: the same, at temperature 1 whatever the tokens were sampled at; None if not asked
                    for.
    """

    logprobs: Tensor
    entropies: Tensor | None = None


@dataclass(frozen=True)
class UpdateResult:
    """One optimizer step.

    Attributes: metrics: token means over the batch.  grad_norm: before clipping.  lr: that was used.
                skipped: the loss or the gradient was not finite and nothing was changed.
                scores: of the weights before the step, if it was asked for.
                computed: [B] bool; False for rows without a gradient, which were left out: ``scores`` are 0.
    """

    metrics: dict[str, float]
    grad_norm: float
    lr: float
    skipped: bool = False
    scores: Scores | None = None
    computed: Tensor | None = field(default=None, compare=False)
