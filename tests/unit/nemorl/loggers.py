"""NeMo-RL's logger, as its trainers call it."""

from collections.abc import Mapping
from typing import Any


class Logger:
    """Keeps what reaches it: (metrics, step, prefix, further arguments by name)."""

    def __init__(self) -> None:
        self.calls: list[tuple[dict[str, Any], int, str | None, dict[str, Any]]] = []

    def log_metrics(
        self, metrics: Mapping[str, Any], step: int, prefix: str | None = "", **named: Any
    ) -> None:
        self.calls.append((dict(metrics), step, prefix, named))
