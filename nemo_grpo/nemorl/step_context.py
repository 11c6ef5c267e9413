"""Values of a step that NeMo-RL's interfaces do not pass on from one of our parts to the next."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

ENTROPIES = "entropies"
"""Key of the entropies in what our worker's ``get_logprobs`` returns."""


@dataclass
class StepContext:
    """Shared by policy, sampling and estimator; every step fills and empties it in this order.

    Attributes:
        metrics: the dictionary that the trainer logs with the step; emptied by `dynamic_sampling`, which
            puts ``reward/*`` of all that was drawn.
        entropies: [B, S] float32, nats, full-vocabulary at temperature 1, index t belongs to token t and
            column 0 is 0, rows as in the batch; put by the policy's ``get_logprobs``, taken by the estimator.
        train_tensors: [B, S] or [B] tensors that the loss reads in addition to NeMo-RL's; put by the
            estimator, added to the data by the policy's ``train``.
        num_sequences: rows that the weights of a mean over groups count; put by the estimator, else 0.
    """

    # Not arguments, because NeMo-RL's trainers call our parts one after the other and pass on only what they
    # know: of `get_logprobs` the logprobs, of `compute_advantage` its one tensor, to `train` the columns that
    # they build themselves. What our parts hand to each other besides has no other way.
    metrics: dict[str, Any] = field(default_factory=dict)
    entropies: Tensor | None = None
    train_tensors: dict[str, Tensor] = field(default_factory=dict)
    num_sequences: int = 0

    def take_entropies(self) -> Tensor | None:
        """Return this step's entropies and clear them, so that no later step reads them."""
        entropies = self.entropies
        self.entropies = None
        return entropies

    def take_train_tensors(self) -> dict[str, Tensor]:
        """Return this step's tensors for the loss and clear them."""
        tensors = self.train_tensors
        self.train_tensors = {}
        return tensors

    def take_row_scale(self, sample_mask: Tensor) -> float:
        """Return the factor on the weights of a mean over groups.

        NeMo-RL divides by all rows of ``sample_mask`` [B], also by those without a token that its
        asynchronous rollouts leave where a request failed; the estimator does not count these.
        """
        num_counted = self.num_sequences
        self.num_sequences = 0
        return float(sample_mask.sum()) / num_counted if num_counted else 1.0
