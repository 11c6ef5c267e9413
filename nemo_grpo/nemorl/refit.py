"""A failed update of the rollouts' weights ends the run at once, with the reason that the worker gave.

NeMo-RL waits for the policy before it asks vLLM's workers whether they took the weights. A policy whose
receiver has failed is blocked in its send: for two minutes over ZMQ, over NCCL until its watchdog ends it.
The error that follows names neither worker nor reason; the worker has printed both.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nemo_grpo.nemorl import compat

log = logging.getLogger(__name__)

GENERATION = "nemo_rl.models.generation.vllm.vllm_generation:VllmGeneration"
UPDATES = ("update_weights_via_ipc_zmq", "update_weights_from_collective")
"""Its methods that start an update; each returns a future per engine: True, or False if it failed."""
MARKS = ("Error in VllmInternalWorkerExtension.", "Exception during collective_rpc for weight update")
"""How the worker's printed error begins. An engine of several GPUs answers only when the other ranks have
given up too; the line comes before."""
POLL_S, GRACE_S = 0.5, 3.0
"""How often is looked, and how long is waited for the rest of a printed error; in seconds."""
MAX_LINES = 40


class RefitFailed(RuntimeError):
    """The rollouts did not get the policy's weights."""


class Refits:
    """Watches the weight updates of one run, while they are made and from the driver."""

    def __init__(self) -> None:
        self.policy: Any = None
        self.sending: list[Any] = []
        self.printed: deque[tuple[Any, str]] = deque(maxlen=1000)

    def install(self) -> None:
        """Wait for every update where NeMo-RL's driver starts it, and listen to what workers print."""
        from ray._private.ray_logging import global_worker_stdstream_dispatcher

        generation = compat.import_name(GENERATION)
        for name in UPDATES:
            setattr(generation, name, self._watched(getattr(generation, name)))
        global_worker_stdstream_dispatcher.add_handler(__name__, self.heard)

    def _watched(self, update: Callable[..., Any]) -> Callable[..., Any]:
        def start_and_wait(*args: Any, **kwargs: Any) -> Any:
            futures = update(*args, **kwargs)
            self.wait(futures)
            return futures

        return start_and_wait

    def heard(self, batch: Mapping[str, Any]) -> None:
        """Lines that a worker has printed, as Ray hands them on."""
        self.printed.extend((batch.get("pid"), line) for line in batch["lines"])

    def sends(self, policy: Any, futures: Sequence[Any]) -> Sequence[Any]:
        """The policy has begun to send; returns ``futures``."""
        self.policy, self.sending = policy, list(futures)
        self.printed.clear()
        return futures

    def wait(self, receiving: Sequence[Any]) -> None:
        """Until every engine has its weights.

        Raises: RefitFailed: one has failed, or the policy has. The policy's workers are killed before, since
                whatever is asked of them next would wait for their send.
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
        """The first error of an update that a worker has printed, with what it printed after."""
        printed = list(self.printed)
        for place, (pid, line) in enumerate(printed):
            if any(mark in line for mark in MARKS):
                lines = [text for worker, text in printed[place:] if worker == pid]
                return "\n".join(lines[:MAX_LINES])
        return ""

    def _fail(self, cause: Exception | None = None) -> None:
        import ray

        if cause is None:
            time.sleep(GRACE_S)  # Ray hands lines on a moment later than results
        for worker in self.policy.worker_group.workers if self.policy is not None else ():
            ray.kill(worker)
        why = str(cause) if cause else self.reason() or "the workers' log says why"
        message = f"the update of the rollouts' weights has failed: {why}"
        log.error(message)  # NeMo-RL's clean-up may raise another error on top
        raise RefitFailed(message) from cause
