"""The tokens that a step learns from, for diagnostics.jsonl: as the embedded engine measures them.

Runs on the driver, on the step that the estimator has prepared; the loss at its start needs no model.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_grpo.core.batch import PreparedBatch
from nemo_grpo.core.objective import Objective
from nemo_grpo.diagnostics.runs import DIAGNOSTICS_FILE
from nemo_grpo.diagnostics.tokens import token_diagnostics


@dataclass(frozen=True)
class StepDiagnostics:
    """Attributes: folder: of the run.  period: first and every n-th step; 0: never.  decode: one token."""

    folder: Path
    period: int
    decode: Callable[[int], str]

    def measure(
        self,
        objective: Objective,
        prepared: PreparedBatch,
        logs: Sequence[Sequence[Mapping[str, Any]]],
        step: int,
    ) -> dict[str, float]:
        """Numbers to log, ``tokens/*``; details to diagnostics.jsonl. Nothing between the periods.

        Args: logs: the responses' conversations, as NeMo-RL's ``message_log``.  step: counts from 1.
        """
        if self.period == 0 or (step > 1 and step % self.period > 0):
            return {}
        tokens = predicted_tokens(logs, prepared.batch.mask.shape[1])
        numbers, details = token_diagnostics(objective, prepared, tokens, self.decode)
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / DIAGNOSTICS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **details}, ensure_ascii=False) + "\n")
        return numbers


def predicted_tokens(logs: Sequence[Sequence[Mapping[str, Any]]], width: int) -> Tensor:
    """[B, width]: the token predicted in each column of a step's tensors; 0 behind a conversation's end."""
    tokens = torch.zeros(len(logs), width, dtype=torch.long)
    for row, messages in zip(tokens, logs, strict=True):
        whole = torch.cat([torch.as_tensor(message["token_ids"]).flatten() for message in messages])
        row[: len(whole) - 1] = whole[1 : width + 1]
    return tokens
