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
    """Measures the tokens of the first and of every n-th step.

    Attributes:
        period: n; 0: never.
        decode: returns the text of token ids.
    """

    folder: RunFolder
    period: int
    decode: Callable[[list[int]], Any]

    def is_due(self, step: int) -> bool:
        """True if this step is measured; steps count from 1. Only the process that leads measures."""
        return self.folder.leads and self.period > 0 and (step == 1 or step % self.period == 0)

    def measure(
        self, objective: Objective, prepared: PreparedBatch, tokens: Tensor, step: int
    ) -> dict[str, float]:
        """Return metrics ``tokens/*`` of a step that is due, and append its details to diagnostics.jsonl.

        Args:
            prepared: the whole step.
            tokens: [B, T], the token that each of its columns predicts.
            step: the step's number.
        """

        def text_of(token: int) -> str:
            return str(self.decode([token]))

        metrics, details = token_diagnostics(objective, prepared, tokens, text_of)
        self.folder.append_diagnostics({"step": step} | details)
        return metrics
