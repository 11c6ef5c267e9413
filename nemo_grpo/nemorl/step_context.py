"""Data that policy, sampling and estimator share within a step, in addition to NeMo-RL's arguments."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

ENTROPIES = "entropies"
"""Key of the entropies in what our worker's ``get_logprobs`` returns."""


@dataclass
class StepContext:
    """Shared by all three; every step fills and empties all but ``carried`` in this order.

    Attributes:
        metrics: the dictionary that the trainer logs with the step; emptied by `dynamic_sampling`, which
            puts ``reward/*`` of all that was drawn.
        entropies: [B, S] float32, nats, full-vocabulary at temperature 1, index t belongs to token t and
            column 0 is 0, rows as in the batch; put by the policy's ``get_logprobs``, taken by the estimator.
        has_gradient: the step can move the policy; set when the driver writes advantages to the data plane,
            read by the training that follows.
        train_tensors: [B, S] or [B] tensors that the loss reads in addition to NeMo-RL's; put by the
            estimator, added to the data by the policy's ``train``.
        num_sequences: rows that the weights of a mean over groups count; put by the estimator, else 0.
        carried: the variant's statistics across steps; kept by the estimator, saved in every checkpoint.
    """

    metrics: dict[str, Any] = field(default_factory=dict)
    entropies: Tensor | None = None
    has_gradient: bool = True
    train_tensors: dict[str, Tensor] = field(default_factory=dict)
    num_sequences: int = 0
    carried: dict[str, float] = field(default_factory=dict)

    def take_entropies(self) -> Tensor | None:
        """Return this step's entropies and clear them, so that no later step reads them."""
        taken, self.entropies = self.entropies, None
        return taken

    def take_train_tensors(self) -> dict[str, Tensor]:
        """Return this step's tensors for the loss and clear them."""
        taken, self.train_tensors = self.train_tensors, {}
        return taken

    def take_row_scale(self, sample_mask: Tensor) -> float:
        """Return the factor on the weights of a mean over groups.

        NeMo-RL divides by all rows of ``sample_mask`` [B], also by those without a token that its
        asynchronous rollouts leave where a request failed; the estimator does not count these.
        """
        counted, self.num_sequences = self.num_sequences, 0
        return float(sample_mask.sum()) / counted if counted else 1.0
