"""Token diagnostics of a step: numbers for metrics.jsonl, details for diagnostics.jsonl."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nemo_grpo.core.batch import PreparedBatch
from nemo_grpo.core.objective import Objective
from nemo_grpo.report.tokens import token_diagnostics
from nemo_grpo.run.folder import RunFolder


@dataclass(frozen=True)
class StepDiagnostics:
    """Measures the tokens of the first step and of every n-th step.

    Attributes:
        folder: Folder of the run.
        period: The number n of steps between two measurements; 0 turns them off.
        decode: Function that returns the text of token ids.
    """

    folder: RunFolder
    period: int
    decode: Callable[[list[int]], Any]

    def is_due(self, step: int) -> bool:
        """True if this process measures this step, counted from 1. Only the leading process measures."""
        return self.folder.leads and self.period > 0 and (step == 1 or step % self.period == 0)

    def measure(
        self, objective: Objective, prepared: PreparedBatch, tokens: Tensor, step: int
    ) -> dict[str, float]:
        """Return the metrics ``tokens/*`` of a step, and append the step's details to diagnostics.jsonl.

        Args:
            objective: Objective of the recipe's variant.
            prepared: Batch of the whole step.
            tokens: [B, T], the token that each column of ``prepared`` predicts.
            step: Number of the step.
        """

        def text_of(token: int) -> str:
            return str(self.decode([token]))

        metrics, details = token_diagnostics(objective, prepared, tokens, text_of)
        self.folder.append_diagnostics({"step": step} | details)
        return metrics
