"""Checkpoints of a policy by megatron-core's distributed checkpointing, but with a writer of our own.

megatron-core before 0.19 forks a process for each file at every save (NVIDIA/Megatron-LM#3633;
tests/unit/engine/test_upstream_faults.py). If the trainer is killed meanwhile, these processes stay and hold
its memory. If one of them is killed, the trainer waits forever. Later versions use threads, and do not say
why one of them failed. Here a thread of this process writes the files. It cannot outlive the process, and it
reports every failure.
"""

import inspect
import io
import logging
import pickle
import queue
import threading
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.validation import StrictHandling

from checkpoints_conv.formats.torch_dist import METADATA, TorchDistReader
from checkpoints_conv.run_config import RUN_CONFIG
from nemo_grpo.engine.megatron.optimizer import SHARDING
from nemo_grpo.engine.megatron.policy import MegatronPolicy
from nemo_grpo.support import distributed
from nemo_grpo.support.errors import UserError, first_line

log = logging.getLogger(__name__)

# Some versions of megatron-core have several writers, and the default one needs another package
# (tests/unit/engine/test_upstream_faults.py).
_STRATEGY: dict[str, Any] = {}
if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:
    _STRATEGY["async_strategy"] = "mcore"

_WRITERS = ("write_preloaded_data_multiproc", "write_preloaded_data_multithread")
"""Names of megatron-core's function that writes a rank's files: before 0.19, and since."""


class PendingWrite:
    """A checkpoint that is being written. Every rank has one, and all ranks call the same methods."""

    def __init__(self, request: Any, *, asynchronous: bool) -> None:
        """Start to write.

        Args:
            request: The result of `dist_checkpointing.save`.
            asynchronous: True to write copies of the tensors in the background. Otherwise the constructor
                returns when this rank's tensors are written.
        """
        self._request = request
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        # This rank may have nothing to write.
        if request.async_fn is None:
            return
        arguments = list(request.async_fn_args)
        if request.preload_fn is not None:
            arguments[1] = request.preload_fn()
        if not asynchronous:
            request.async_fn(*arguments, **request.async_fn_kwargs)
            return
        # With a GPU the tensors are copies on the host already. On a CPU they are the weights themselves,
        # which the next update changes.
        if not torch.cuda.is_available():
            arguments[1] = [_copied(bucket) for bucket in arguments[1]]

        def write() -> None:
            try:
                request.async_fn(*arguments, **request.async_fn_kwargs)
            except BaseException as error:
                # `finish` reports the error.
                self._error = error

        # The thread is a daemon, so that a trainer that fails for another reason does not wait for it.
        self._thread = threading.Thread(target=write, daemon=True)
        self._thread.start()

    def is_written(self) -> bool:
        """True if this rank has written all of its tensors, or has failed."""
        return self._thread is None or not self._thread.is_alive()

    def finish(self) -> None:
        """Wait until this rank's tensors are written, then write the metadata with the other ranks."""
        if self._thread is not None:
            self._thread.join()
        # The error goes into megatron-core's queue: its exchange of results then fails on all ranks together.
        if self._error is not None:
            filesystem_async._results_queue.put(self._error)
        for finalize in self._request.finalize_fns:
            finalize()


def _copied(bucket: tuple[Any, Any, tuple[Any, list[tuple[Any, torch.Tensor]]]]) -> tuple[Any, Any, Any]:
    """Copy the tensors in a bucket, which megatron-core's writer has as (file, key, (objects, tensors))."""
    file, key, (objects, tensors) = bucket
    copies = [(item, tensor.clone()) for item, tensor in tensors]
    return file, key, (objects, copies)


def begin_save(
    policy: MegatronPolicy, folder: Path, iteration: int, *, asynchronous: bool = False
) -> PendingWrite:
    """Begin to write model, optimizer and schedule as torch_dist. The result's ``finish`` completes it.

    Every rank of the policy calls this function. With LoRA only the adapters are written, under
    Megatron-Bridge's names, and their scale is in `RUN_CONFIG`.

    Args:
        policy: This rank's part of the policy.
        folder: Folder to write.
        iteration: Step of the run.
        asynchronous: True to write the tensors in the background.
    """
    write_in_this_process()
    folder.mkdir(parents=True, exist_ok=True)
    state: dict[str, Any] = policy.sharded_state_dict(loading=False)
    state |= {"iteration": iteration, "lora": _lora_of(policy)}
    with torch.no_grad():
        request = dist_checkpointing.save(
            state, str(folder), async_sharded_save=True, content_metadata=SHARDING, **_STRATEGY
        )
        pending = PendingWrite(request, asynchronous=asynchronous)
    if policy.lora is not None and distributed.is_rank_zero():
        (folder / RUN_CONFIG).write_text(f"peft:\n  dim: {policy.lora.dim}\n  alpha: {policy.lora.alpha}\n")
    return pending


def write_in_this_process() -> None:
    """Make megatron-core write by `_write_files`, in this process. A second call changes nothing."""
    if getattr(filesystem_async, "_results_queue", None) is None:
        filesystem_async._results_queue = queue.Queue()
    for name in _WRITERS:
        if hasattr(filesystem_async.FileSystemWriterAsync, name):
            setattr(filesystem_async.FileSystemWriterAsync, name, staticmethod(_write_files))


def _write_files(
    transforms: list[Any], _use_msc: bool, _rank: int, buckets: list[Any], results: queue.Queue[Any]
) -> None:
    """Write and flush a file for each bucket, and put the results, or the first error, into the queue.

    The signature is that of megatron-core's functions in `_WRITERS`.
    """
    outcomes: dict[int, Any] = {}
    # megatron-core's writer counts its processes in this queue. Here there are none, so it does nothing.
    processes = SimpleNamespace(get=lambda: None, task_done=lambda: None)
    for number, bucket in enumerate(buckets):
        result: queue.Queue[Any] = queue.Queue()
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(
            transforms, number, bucket, result, processes, use_fsync=True
        )
        _, outcome = result.get_nowait()
        if isinstance(outcome, Exception):
            results.put(outcome)
            return
        outcomes[number] = outcome
    results.put(outcomes)


def check_readable(folder: Path) -> None:
    """Refuse a checkpoint whose index cannot be read back.

    Incompatible versions of torch and megatron-core can write such checkpoints. No tensor is read.
    """
    try:
        load_sharded_metadata(str(folder))
        dist_checkpointing.load_common_state_dict(str(folder))
    # Incompatible packages may raise any kind of error.
    except Exception as error:
        installed = " and ".join(f"{name} {version(name)}" for name in ("torch", "megatron-core"))
        raise UserError(
            f"{folder} was written and cannot be read back: no run could resume from it. {installed} do not "
            f"fit ({type(error).__name__}: {first_line(error)}); install nemo-grpo again, by `pip install`, "
            "which chooses versions that do"
        ) from error


def load_policy(policy: MegatronPolicy, folder: Path) -> None:
    """Load a checkpoint of `begin_save` at this policy's layout. The policy must have its optimizer."""
    # Our own reader opens the checkpoint first, because it refuses metadata that would run code.
    with closing(TorchDistReader(folder)) as reader:
        if reader.folder != folder:
            raise UserError(f"{folder} has no {METADATA}, a folder in it has; copy the checkpoint again")
    with _data_alone():
        _load_policy(policy, folder)


def _load_policy(policy: MegatronPolicy, folder: Path) -> None:
    recorded_lora = dist_checkpointing.load_common_state_dict(str(folder)).get("lora")
    if recorded_lora != _lora_of(policy):
        raise UserError(
            f"{folder} was written with LoRA settings {recorded_lora}, policy.megatron_cfg.peft says "
            f"{_lora_of(policy)}; resume with the same ones (None: peft.enabled=false)"
        )
    state = policy.sharded_state_dict(loading=True)
    absent = _absent_extra_states(state["model"], folder)
    for name in absent:
        del state["model"][name]
    with warnings.catch_warnings():
        # megatron-core 0.16 calls torch's functions by their deprecated names
        # (tests/unit/engine/test_upstream_faults.py).
        warnings.filterwarnings("ignore", "`load_state_dict` is deprecated", FutureWarning)
        warnings.filterwarnings("ignore", "Please use DTensor instead", FutureWarning)
        loaded = dist_checkpointing.load(state, str(folder), strict=StrictHandling.RAISE_UNEXPECTED)
    # A layer whose extra state is None keeps the state that it was built with.
    loaded["model"] |= dict.fromkeys(absent)
    policy.load_state_dict(loaded)


@contextmanager
def _data_alone() -> Iterator[None]:
    """Within the block, let ``torch.load`` read data but run no pickled code.

    torch's checkpoint reader, as of 2.13, allows such code (tests/unit/engine/test_upstream_faults.py).
    """
    load = torch.load

    def restricted(*args: Any, **kwargs: Any) -> Any:
        return load(*args, **{**kwargs, "weights_only": True})

    torch.load = restricted
    try:
        # Transformer Engine stores the scaling history of FP8 in a BytesIO, so that type is allowed.
        with torch.serialization.safe_globals([io.BytesIO]):
            yield
    except pickle.UnpicklingError as error:
        raise UserError(
            f"the checkpoint holds something besides data and was not read: {first_line(error)}"
        ) from None
    finally:
        torch.load = load


def _absent_extra_states(model: dict[str, Any], folder: Path) -> list[str]:
    """List Transformer Engine's extra states that the checkpoint lacks, because other layers wrote it.

    The states have the scaling history of FP8, which the layers build again. Anything else that is missing is
    an error when the checkpoint is loaded.
    """
    keys = {
        name: part.unique_key
        for name, part in model.items()
        if isinstance(part, ShardedObject) and name.endswith("._extra_state")
    }
    if not keys:
        return []
    metadata = load_sharded_metadata(str(folder))
    absent = [name for name, key in keys.items() if key not in metadata]
    if absent:
        log.info("%s was written by other layers: %d FP8 states begin anew", folder, len(absent))
    return absent


def _lora_of(policy: MegatronPolicy) -> dict[str, Any] | None:
    return None if policy.lora is None else asdict(policy.lora)
