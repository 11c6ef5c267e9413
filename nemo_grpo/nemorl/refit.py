"""Ends the run at once if a weight update of the rollouts fails, quoting the worker's reason.

NeMo-RL waits for the policy before it asks vLLM's workers whether they received the weights. A policy whose
receiver has failed is blocked in its send: over ZMQ for two minutes, over NCCL until the watchdog ends it.
The error that follows names neither worker nor reason, both of which the worker has printed.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nemo_grpo.nemorl import hooks

log = logging.getLogger(__name__)

UPDATES = ("update on the same GPUs", "update on other GPUs")
"""Hooks of what starts an update; each returns a future per engine: True, or False if it failed."""
MARKS = ("Error in VllmInternalWorkerExtension.", "Exception during collective_rpc for weight update")
"""Start of the worker's printed error. An engine of several GPUs returns only once the other ranks have given
up too; the line appears earlier."""
POLL_S, GRACE_S = 0.5, 3.0
"""Polling interval, and how long to wait for the rest of a printed error; in seconds."""
MAX_LINES = 40


class RefitFailed(RuntimeError):
    """The rollouts did not get the policy's weights."""


class Refits:
    """Watches one run's weight updates from the driver."""

    def __init__(self) -> None:
        self.policy: Any = None
        self.sending: list[Any] = []
        self.printed: deque[tuple[Any, str]] = deque(maxlen=1000)

    def install(self) -> None:
        """Make NeMo-RL's driver wait for every update that it starts, and listen to the workers' output."""
        from ray._private.ray_logging import global_worker_stdstream_dispatcher

        for key in UPDATES:
            hooks.install(key, self.watched)
        global_worker_stdstream_dispatcher.add_handler(__name__, self.heard)

    def watched(self, update: Callable[..., Any]) -> Callable[..., Any]:
        """What starts an update and waits for it."""

        def start_and_wait(*args: Any, **kwargs: Any) -> Any:
            futures = update(*args, **kwargs)
            self.wait(futures)
            return futures

        return start_and_wait

    def heard(self, batch: Mapping[str, Any]) -> None:
        """Record lines that a worker printed, as forwarded by Ray."""
        self.printed.extend((batch.get("pid"), line) for line in batch["lines"])

    def sends(self, policy: Any, futures: Sequence[Any]) -> Sequence[Any]:
        """The policy has begun to send; returns ``futures``."""
        self.policy, self.sending = policy, list(futures)
        self.printed.clear()
        return futures

    def wait(self, receiving: Sequence[Any]) -> None:
        """Wait until every engine has its weights.

        Raises: RefitFailed: an engine or the policy failed. The policy's workers are killed first, since
                their next call would wait for their blocked send.
        """
        import ray

        pending, failed_at = [*self.sending, *receiving], None
        while any(future in pending for future in receiving):
            ready, pending = ray.wait(pending, num_returns=1, timeout=POLL_S)
            for future in ready:
                try:
                    failed = ray.get(future) is False
                except Exception as error:
                    self._fail(error)
                if failed:
                    self._fail()
            if failed_at is None and self.reason():
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() - failed_at > GRACE_S:
                self._fail()

    def reason(self) -> str:
        """The first update error that a worker printed, with the lines after it."""
        printed = list(self.printed)
        for place, (pid, line) in enumerate(printed):
            if any(mark in line for mark in MARKS):
                lines = [text for worker, text in printed[place:] if worker == pid]
                return "\n".join(lines[:MAX_LINES])
        return ""

    def _fail(self, cause: Exception | None = None) -> None:
        import ray

        if cause is None:
            time.sleep(GRACE_S)  # Ray forwards lines a moment later than results
        for worker in self.policy.worker_group.workers if self.policy is not None else ():
            ray.kill(worker)
        why = str(cause) if cause else self.reason() or "the workers' log says why"
        message = f"the weight update of the rollouts failed: {why}"
        log.error(message)  # NeMo-RL's clean-up may raise another error on top
        raise RefitFailed(message) from cause
