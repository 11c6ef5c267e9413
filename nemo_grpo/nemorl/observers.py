"""Callbacks on NeMo-RL's logger: one observer, shared by all listeners."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from nemo_grpo.nemorl import hooks

Adds = Callable[[Mapping[str, Any], int, str], Mapping[str, Any]]
"""(metrics, step, prefix) -> further metrics of the same call."""
Told = Callable[[Mapping[str, Any], int, str], None]
"""(metrics, step, prefix), after NeMo-RL has logged them."""


class LoggerObserver:
    """Stands in the place of a logger's ``log_metrics`` while anybody listens."""

    def __init__(self, logger: Any) -> None:
        self.theirs: Callable[..., Any] = logger.log_metrics
        self.adds: list[Adds] = []
        self.told: list[Told] = []
        self.undo = hooks.install("metrics", lambda _theirs: self.log_metrics, logger)

    def log_metrics(self, metrics: Mapping[str, Any], step: int, *rest: Any, **named: Any) -> Any:
        """NeMo-RL's, with the additions."""
        prefix = named.get("prefix", rest[0] if rest else "") or ""
        for add in self.adds:
            metrics = {**metrics, **add(metrics, step, prefix)}
        done = self.theirs(metrics, step, *rest, **named)
        for tell in self.told:
            tell(metrics, step, prefix)
        return done


@contextmanager
def listening(logger: Any, *, adds: Adds | None = None, told: Told | None = None) -> Iterator[None]:
    """Within the block, add metrics to every call of NeMo-RL's logger, or hear of it."""
    current = getattr(logger.log_metrics, "__self__", None)
    observer = current if isinstance(current, LoggerObserver) else LoggerObserver(logger)
    observer.adds += [adds] if adds else []
    observer.told += [told] if told else []
    try:
        yield
    finally:
        if adds:
            observer.adds.remove(adds)
        if told:
            observer.told.remove(told)
        if not (observer.adds or observer.told):
            observer.undo()
