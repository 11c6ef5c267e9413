"""Exports of NeMo-RL's Megatron checkpoints, and the tokenizer and model configuration that those need."""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_grpo.errors import UserError
from nemo_grpo.families import family_for
from nemo_grpo.hf_folder import check_model_folder
from nemo_grpo.launch.settings import folder_of
from nemo_grpo.nemorl.observers import after_checkpoint, after_checkpoint_begun

if TYPE_CHECKING:
    from nemo_grpo.nemorl.config import ClusterRun
    from nemo_grpo.nemorl.exchange import StepExchange
    from nemo_grpo.variants.base import VariantConfig

log = logging.getLogger(__name__)

SIDE_FOLDER = Path("policy") / "tokenizer"
"""Where in ``step_N``: config.json, tokenizer and chat template; the converters' --hf-config."""
CARRIED = "nemo_grpo.json"
"""File in ``step_N``: what the variant carries from step to step; only for a variant that does."""
WAITING = ".exports"
"""Folder beside the checkpoints that holds those waiting for conversion."""


def save_side_files(
    checkpointer: Any, tokenizer: Any, model_config: Any, exchange: StepExchange | None = None
) -> None:
    """From now on, put tokenizer and configuration into every checkpoint that ``checkpointer`` begins.

    Args: checkpointer: NeMo-RL's `CheckpointManager`.  tokenizer: a tokenizer or processor.
          model_config: transformers' configuration of the model.  exchange: its ``carried`` goes there, too.
    """
    generation_config = _generation_config(model_config.name_or_path)

    def add(folder: Any) -> None:
        side = Path(folder) / SIDE_FOLDER
        side.mkdir(parents=True, exist_ok=True)
        model_config.save_pretrained(side)
        if generation_config is not None:
            generation_config.save_pretrained(side)
        tokenizer.save_pretrained(side)
        if exchange is not None and exchange.carried:
            (Path(folder) / CARRIED).write_text(json.dumps(exchange.carried))

    after_checkpoint_begun(checkpointer, add)


def _generation_config(model: str) -> Any:
    """The model's generation_config.json; None if it has none."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(model)
    except OSError:
        return None


def resume_carried(config: VariantConfig, checkpointer: Any, exchange: StepExchange) -> None:
    """Put what the newest checkpoint's variant carried into ``exchange``.

    Raises: UserError: the variant carries statistics and that checkpoint has none.
    """
    newest = checkpointer.get_latest_checkpoint_path()
    if newest is None or not config.carries_statistics:
        return
    path = Path(newest) / CARRIED
    try:
        exchange.carried = dict(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise UserError(
            f"loss_fn.variant={config.variant} carries statistics over steps, and {path} has none ({error}); "
            "resume with the loss_fn that the run was started with, or start another run"
        ) from None


def exports_of(run: ClusterRun, hf_config: Any) -> Exports | None:
    """Exports of every checkpoint, if the recipe asks for them.

    Args:   hf_config: transformers' configuration of the model.
    Raises: UserError: the converter does not support the model, LoRA's base is not on this machine, or the
            checkpoint folder supports no hard links.
    """
    recipe, export = run.recipe, run.recipe.nemo_grpo.export
    if not (export.at_every_save and recipe.checkpointing.enabled):
        return None
    try:
        family_for(json.loads(hf_config.to_json_string()))
    except UserError as error:
        raise UserError(
            f"nemo_grpo.export.at_every_save=true: {recipe.policy.model_name} cannot be exported ({error}); "
            "set it to false"
        ) from None
    base = None
    if recipe.policy.megatron_cfg.lora_in_use:
        base = Path(folder_of(recipe.policy.model_name or "")).absolute()
        check_model_folder(base, "nemo_grpo.export.at_every_save=true merges LoRA, and policy.model_name")
    exports = Exports(recipe.checkpoint_dir.absolute(), recipe.run_dir.absolute() / "hf", export.dtype, base)
    exports.check()
    return exports


class Exports:
    """Hugging Face folders of finished checkpoints, exported one at a time while training continues.

    NeMo-RL deletes checkpoints that are not among the best (keep_top_k), even while one is being read. Each
    is therefore kept by hard links in `WAITING`, optimizer included, because weights and optimizer share
    files. The links are removed when the export ends, successfully or not. Links found when a run starts
    belong to an interrupted export, which is repeated; a failed export is repeated if NeMo-RL still has the
    checkpoint. No failure in here ends the training.
    """

    def __init__(self, checkpoint_dir: Path, folder: Path, dtype: str, lora_base: Path | None = None) -> None:
        """Args: checkpoint_dir: has NeMo-RL's ``step_N``.  folder: gets ``step_N``, too.  dtype: of these.
        lora_base: model that the checkpoints' adapters are merged into; None: they hold whole models.
        """
        self.checkpoint_dir, self.folder, self.dtype = checkpoint_dir, folder, dtype
        self.lora_base = lora_base
        self.waiting = checkpoint_dir / WAITING
        self.failed: list[str] = []
        self._queue: queue.SimpleQueue[Path | None] = queue.SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopped = False
        self._thread = threading.Thread(target=self._convert_all, name="export", daemon=True)

    def check(self) -> None:
        """Check that the file system supports hard links.

        Raises: UserError: it does not.
        """
        self.waiting.mkdir(parents=True, exist_ok=True)
        file, link = self.waiting / f".probe{os.getpid()}", self.waiting / f".link{os.getpid()}"
        file.touch()
        try:
            os.link(file, link)
            link.unlink()
        except OSError as error:
            raise UserError(
                f"nemo_grpo.export.at_every_save=true: no hard links in {self.waiting} ({error.strerror}), "
                "which keep a checkpoint until it is converted; set it to false and convert afterwards, or "
                "choose another checkpointing.checkpoint_dir"
            ) from None
        finally:
            file.unlink()

    def begin(self) -> None:
        """Start converting: first an interrupted run's checkpoints, then those of `after_every_save`."""
        for partial in self.waiting.glob("tmp_*"):
            shutil.rmtree(partial, ignore_errors=True)
        left = _steps(self.waiting)
        for links in left:
            self._queue.put(links)
        for checkpoint in _steps(self.checkpoint_dir):
            if checkpoint.name not in {links.stem for links in left} and self._is_missing(checkpoint):
                self._link(checkpoint)  # the run ended before its export, or that failed
        self._thread.start()

    def after_every_save(self, checkpointer: Any) -> None:
        """From now on, export every checkpoint that ``checkpointer`` finishes."""

        def link(checkpoint_path: Any) -> None:
            path = Path(checkpoint_path)  # the newest, which NeMo-RL keeps at least until the next
            self._link(path.with_name(path.name.removeprefix("tmp_")))

        after_checkpoint(checkpointer, link)

    def _is_missing(self, checkpoint: Path) -> bool:
        """True without an export, or with one of an older checkpoint of the same step."""
        export = self.folder / checkpoint.name
        return not export.exists() or export.stat().st_mtime < checkpoint.stat().st_mtime

    def _link(self, checkpoint: Path) -> None:
        # A unique number: an older checkpoint of the same step may be in use right now.
        links = self.waiting / f"{checkpoint.name}.{time.time_ns()}"
        partial = links.with_name(f"tmp_{links.name}")
        try:
            shutil.copytree(checkpoint, partial, copy_function=os.link)
            partial.rename(links)
        except OSError as error:  # a quota, too many links; shutil.Error is one, too
            log.error("%s cannot be kept for its export: %s", checkpoint, error)
            self.failed.append(checkpoint.name)
            shutil.rmtree(partial, ignore_errors=True)
        else:
            self._queue.put(links)

    def _convert_all(self) -> None:
        while (links := self._queue.get()) is not None and not self._is_stopped:
            if not links.exists():  # requested twice
                continue
            try:
                is_converted = self._convert(links) == 0
            except Exception:
                log.exception("export of %s", links.stem)
                is_converted = False
            if not is_converted:
                if self._is_stopped:
                    return
                log.error("export of %s failed, see %s", links.stem, self.folder / f"{links.stem}.log")
                self.failed.append(links.stem)
            self._drop(links)

    def _drop(self, links: Path) -> None:
        gone = links.with_name(f"tmp_{links.name}")  # its remains are never taken for a checkpoint
        try:
            links.rename(gone)
            shutil.rmtree(gone)
        except OSError as error:  # NFS keeps files that are open
            log.warning("%s stays until the next start: %s", gone, error)

    def _convert(self, links: Path) -> int:
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "checkpoints_conv", *self._arguments(links)]
        with (self.folder / f"{links.stem}.log").open("wb") as report:
            self._process = subprocess.Popen(command, stdout=report, stderr=subprocess.STDOUT)
        if self._is_stopped:  # meanwhile
            self._process.terminate()
        return self._process.wait()

    def _arguments(self, checkpoint: Path) -> list[str]:
        arguments = ["megatron-to-hf", "--force", "--megatron-checkpoint", str(checkpoint)]
        arguments += ["--hf-config", str(checkpoint / SIDE_FOLDER)]
        arguments += ["--output", str(self.folder / checkpoint.stem)]
        if self.lora_base is not None:
            arguments += ["--lora", "merge", "--base", str(self.lora_base)]
        return [*arguments, "--dtype", self.dtype]

    def wait(self) -> bool:
        """Wait for all exports; False if any failed, which is logged with the remedy."""
        self._end()
        for name in dict.fromkeys(self.failed):
            checkpoint = self.checkpoint_dir / name
            if checkpoint.exists():
                again = shlex.join(["nemo-grpo", "convert", *self._arguments(checkpoint)])
                log.error("no export %s; the next start tries again, or: %s", self.folder / name, again)
            else:
                log.error("no export %s; NeMo-RL has deleted its checkpoint", self.folder / name)
        return not self.failed

    def stop(self) -> None:
        """Stop at once; the next start converts the rest."""
        self._is_stopped = True
        if self._process is not None:
            self._process.terminate()
        self._end()

    def _end(self) -> None:
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join()


def _steps(folder: Path) -> list[Path]:
    """Checkpoints or links in a folder, ordered by step, then by the links' creation."""
    found = [path for path in folder.glob("step_*") if re.fullmatch(r"step_\d+(\.\d+)?", path.name)]
    return sorted(found, key=lambda path: (int(path.stem.removeprefix("step_")), int(path.suffix[1:] or 0)))
