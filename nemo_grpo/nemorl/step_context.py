"""Values that policy, sampling and estimator exchange within a step, past NeMo-RL's interfaces."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

ENTROPIES = "entropies"
"""Key of the entropies in what our worker's ``get_logprobs`` returns."""


@dataclass
class StepContext:
    """Values shared by policy, sampling and estimator; every step fills and empties them in this order.

    Attributes:
        metrics: the dictionary that the trainer logs with the step; emptied by `dynamic_sampling`, which
            adds ``reward/*`` of all draws.
        entropies: [B, S] float32, nats, full-vocabulary at temperature 1, index t belongs to token t and
            column 0 is 0, rows as in the batch; put by the policy's ``get_logprobs``, taken by the estimator.
        train_tensors: [B, S] or [B] tensors that the loss reads in addition to NeMo-RL's; put by the
            estimator, added to the data by the policy's ``train``.
        num_sequences: rows that the weights of a mean over groups count; put by the estimator, else 0.
    """

    # A shared object instead of arguments and return values: NeMo-RL's trainers call these parts one after
    # the other and pass on only what they know. They take the logprobs from `get_logprobs`, one tensor from
    # `compute_advantage`, and give `train` the columns that they build themselves.
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

        NeMo-RL divides by all rows of ``sample_mask`` [B], the estimator only by rows that have tokens. They
        differ where a request of asynchronous rollouts failed, which leaves a row without tokens.
        """
        num_counted = self.num_sequences
        self.num_sequences = 0
        return float(sample_mask.sum()) / num_counted if num_counted else 1.0
