"""Saving of checkpoints, at once or in the background, and the export of the trained model."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint import CheckpointException

from nemo_grpo.engine.checkpoint_store import WEIGHTS, CheckpointStore
from nemo_grpo.engine.megatron.policy import MegatronPolicy
from nemo_grpo.engine.megatron.policy_checkpoint import PendingWrite, begin_save, check_readable
from nemo_grpo.run.folder import SIDE_FOLDER, RunFolder
from nemo_grpo.support import distributed
from nemo_grpo.support.errors import UserError, first_line
from nemo_grpo.support.files import existing_parent
from nemo_grpo.support.hf_folder import export, export_adapter, stated_dtype
from nemo_grpo.support.model_card import Training
from nemo_grpo.support.model_folder import copy_side_files


class TrainingAborted(RuntimeError):
    """Error of a run that cannot go on, because its loss, weights or disk are unusable. Its files stay."""


@dataclass(frozen=True)
class _SaveUnderWay:
    """A checkpoint that is being written.

    Attributes:
        step: Step of the run.
        info: Content of the checkpoint's training_info.json.
        write: Pending write of this rank's tensors.
    """

    step: int
    info: dict[str, Any]
    write: PendingWrite


@dataclass
class Saver:
    """Saves checkpoints of the policy. All ranks must call its methods at the same points.

    Attributes:
        store: Folder of the checkpoints.
        policy: The policy.
        source: Model folder whose tokenizer and config.json are copied into each checkpoint.
        asynchronous: True if `save` returns while tensors are still being written. At most one save is under
            way.
        saved: Step of the newest checkpoint.
    """

    store: CheckpointStore
    policy: MegatronPolicy
    source: Path
    asynchronous: bool = False
    saved: int = 0
    _under_way: _SaveUnderWay | None = field(default=None, init=False)

    def save(self, step: int, info: dict[str, Any]) -> None:
        """Finish the save under way, then write a checkpoint of the current state."""
        self.finish()
        with self._explained(step):
            folder = self.store.begin(step)
            if self.store.leads:
                copy_side_files(self.source, folder / SIDE_FOLDER)
            write = begin_save(self.policy, folder / WEIGHTS, step, asynchronous=self.asynchronous)
            self._under_way = _SaveUnderWay(step, info, write)
        self.saved = step
        if not self.asynchronous:
            self.finish()

    def finish_if_written(self) -> None:
        """Complete the save under way if every rank has written its part. Called after each step."""
        if self._under_way is None:
            return
        is_written = self._under_way.write.is_written()
        # Completing a save waits for all ranks, so all of them must make the same decision here.
        if not distributed.any_rank(not is_written, self.policy.device):
            self.finish()

    def finish(self) -> None:
        """Complete the save under way, if there is one."""
        if self._under_way is None:
            return
        save = self._under_way
        # This comes first, so that a save that fails here is not tried again when the run ends.
        self._under_way = None
        with self._explained(save.step):
            save.write.finish()
            self.store.barrier()
            check_readable(self.store.temporary(save.step) / WEIGHTS)
            self.store.complete(save.step, save.info)

    @contextmanager
    def _explained(self, step: int) -> Iterator[None]:
        """Turn errors of writing into `TrainingAborted`, whose message has the free space of the disk."""
        try:
            yield
        except (OSError, RuntimeError, CheckpointException) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
            free_gb = shutil.disk_usage(existing_parent(self.store.folder)).free / 1e9
            newest = self.store.latest()
            continuation = newest.name if newest else "the beginning: there is no checkpoint yet"
            raise TrainingAborted(
                f"the checkpoint of step {step} cannot be written to {self.store.folder} ({reason}), where "
                f"{free_gb:.1f} GB are free; make room, then --resume continues from {continuation}"
            ) from error


def export_policy(
    policy: MegatronPolicy, source: Path, run: RunFolder, dtype: torch.dtype | None, training: Training
) -> None:
    """Write the model and, with LoRA, also its adapters as Hugging Face folders. Every rank calls it.

    Args:
        policy: The trained policy.
        source: Model folder that the run began with, whose tokenizer and config are copied.
        run: Folder of the run, in which ``hf`` and ``hf-adapter`` are written.
        dtype: Precision of the model. None stands for float32 or, with LoRA, for that of the base model, like
            the result of `convert --lora merge`.
        training: Facts for the model card.
    """
    if dtype is None:
        dtype = torch.float32 if policy.adapters is None else stated_dtype(source)
    # All ranks must take part in the gathering, but only the first one writes.
    tensors = list(policy.named_tensors())
    with _export_explained(run):
        if run.leads:
            export(tensors, source, run.hf, dtype, training)
        if policy.adapters is None:
            return
        matrices = policy.adapters.peft_tensors()
        settings = policy.adapters.settings
        if run.leads:
            export_adapter(matrices, source, run.hf_adapter, training, dim=settings.dim, alpha=settings.alpha)


@contextmanager
def _export_explained(run: RunFolder) -> Iterator[None]:
    """Turn errors of an export into `TrainingAborted`, so that the command ends with a message."""
    try:
        yield
    except UserError as error:
        raise TrainingAborted(str(error)) from None
    except (OSError, SafetensorError) as error:
        raise TrainingAborted(
            f"{run.hf} cannot be written ({first_line(error)}); make room, then --resume exports again"
        ) from error
