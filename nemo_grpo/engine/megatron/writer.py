"""Writing a checkpoint's tensors: by this process, at once or behind the training's back.

megatron-core before 0.19 forks a process per file at every save. A trainer killed meanwhile leaves them
asleep with its memory, and one of them killed leaves the trainer waiting for ever. Later versions use threads
and do not say why one of them failed. Here the files are written by a thread of this process, which cannot
outlive it and tells every failure.
"""

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async

_WRITERS = ("write_preloaded_data_multiproc", "write_preloaded_data_multithread")
"""Before 0.19, and since."""


def install() -> None:
    """Make megatron-core write in this process, and collect the results there; safe to call twice."""
    if getattr(filesystem_async, "_results_queue", None) is None:
        filesystem_async._results_queue = queue.Queue()
    writer = filesystem_async.FileSystemWriterAsync
    for name in _WRITERS:
        if hasattr(writer, name):
            setattr(writer, name, staticmethod(_write_files))


def _write_files(
    transforms: list[Any], _use_msc: bool, _rank: int, buckets: list[Any], results: queue.Queue[Any]
) -> None:
    """Write and flush one file per bucket; the results, or what was raised, go into the queue."""
    written: dict[int, Any] = {}
    for number, bucket in enumerate(buckets):
        result: queue.Queue[Any] = queue.Queue()
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(
            transforms, number, bucket, result, _Count(), use_fsync=True
        )
        _, outcome = result.get_nowait()
        if isinstance(outcome, Exception):
            results.put(outcome)
            return
        written[number] = outcome
    results.put(written)


class _Count:
    """Stand-in for the writer's count of its processes; there are none."""

    def get(self) -> None:
        pass

    def task_done(self) -> None:
        pass


class PendingWrite:
    """A checkpoint whose tensors are being written. Every rank makes one and calls its methods alike."""

    def __init__(self, request: Any, *, behind: bool) -> None:
        """Start.

        Args: request: what `dist_checkpointing.save` returned.  behind: return at once, with copies of the
              tensors; otherwise when this rank's are written.
        """
        self._request = request
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if request.async_fn is None:  # nothing to write on this rank
            return
        arguments = list(request.async_fn_args)
        if request.preload_fn is not None:
            arguments[1] = request.preload_fn()
        if not behind:
            request.async_fn(*arguments, **request.async_fn_kwargs)
            return
        if not torch.cuda.is_available():  # from a GPU these are copies already
            arguments[1] = _copied(arguments[1])
        self._thread = threading.Thread(
            target=self._guarded(request.async_fn),
            args=arguments,
            kwargs=request.async_fn_kwargs,
            daemon=True,
        )
        self._thread.start()

    def _guarded(self, write: Callable[..., None]) -> Callable[..., None]:
        def guarded(*arguments: Any, **settings: Any) -> None:
            try:
                write(*arguments, **settings)
            except BaseException as error:
                self._error = error

        return guarded

    def is_written(self) -> bool:
        """True when this rank has nothing left to write; it may have failed."""
        return self._thread is None or not self._thread.is_alive()

    def finish(self) -> None:
        """Wait for this rank's tensors, then, with the other ranks, write the metadata.

        Raises: CheckpointException: a rank could not write.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            filesystem_async._results_queue.put(self._error)
        for finalize in self._request.finalize_fns:
            finalize()


def _copied(buckets: list[Any]) -> list[Any]:
    return [
        (file, key, (objects, [(item, tensor.clone()) for item, tensor in tensors]))
        for file, key, (objects, tensors) in buckets
    ]
