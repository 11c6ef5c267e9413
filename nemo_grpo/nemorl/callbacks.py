"""Callbacks on NeMo-RL's logger and checkpoint manager, and the record of a run that one of them writes."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from numbers import Real
from pathlib import Path
from typing import Any

from nemo_grpo.nemorl.compat import rebound
from nemo_grpo.recipe import Recipe
from nemo_grpo.report.runs import validation_note
from nemo_grpo.report.stuck import SIGNAL, Watch
from nemo_grpo.run.continuation import data_files, keep_inputs
from nemo_grpo.run.folder import RunFolder, newest_checkpoint, step_of

log = logging.getLogger(__name__)


class Callback:
    """Base class of what NeMo-RL's logger and checkpoint manager call; a subclass overrides what it needs."""

    def added_metrics(self, metrics: Mapping[str, Any], step: int, prefix: str) -> Mapping[str, float]:
        """Return further metrics to log with these."""
        return {}

    def on_metrics(self, metrics: Mapping[str, Any], step: int, prefix: str) -> None:
        """Handle metrics that NeMo-RL has logged, including the added ones."""

    def on_checkpoint(self, folder: Path) -> None:
        """Put files into a checkpoint that NeMo-RL has started."""


def is_validation(metrics: Mapping[str, Any], prefix: str) -> bool:
    """Return True for the metrics of a validation.

    NeMo-RL logs other numbers of a validation by further calls with the same prefix, which have no accuracy.
    """
    return prefix == "validation" and "accuracy" in metrics


@contextmanager
def calling_back(
    callbacks: Sequence[Callback], logger: Any = None, checkpointer: Any = None
) -> Iterator[None]:
    """Make NeMo-RL's logger and checkpoint manager call these callbacks, in order, within the block."""

    def log_and_call_back(log_as_nemo_rl: Callable[..., Any]) -> Callable[..., Any]:
        def log_metrics(metrics: dict[str, Any], step: int, *arguments: Any, **named: Any) -> Any:
            # NeMo-RL passes the prefix by position or by name, and None for "no prefix".
            prefix = arguments[0] if arguments else named.get("prefix")
            if prefix is None:
                prefix = ""
            # Change it in place: NeMo-RL reads the same dictionary to rank checkpoints and to stop early.
            for callback in callbacks:
                metrics.update(callback.added_metrics(metrics, step, prefix))
            result = log_as_nemo_rl(metrics, step, *arguments, **named)
            for callback in callbacks:
                callback.on_metrics(metrics, step, prefix)
            return result

        return log_metrics

    def begin_and_call_back(begin_as_nemo_rl: Callable[..., Any]) -> Callable[..., Any]:
        def init_tmp_checkpoint(*arguments: Any, **named: Any) -> Any:
            folder = begin_as_nemo_rl(*arguments, **named)
            for callback in callbacks:
                callback.on_checkpoint(Path(folder))
            return folder

        return init_tmp_checkpoint

    with ExitStack() as stack:
        if logger is not None:
            stack.enter_context(rebound("metrics", log_and_call_back, logger))
        if checkpointer is not None:
            stack.enter_context(rebound("checkpoint begun", begin_and_call_back, checkpointer))
        yield


OUR_NAMES = {
    "train/reward": "reward/mean",
    "train/filtered_reward": "kept/reward/mean",
    "train/loss": "loss/total",
    "train/grad_norm": "grad_norm",
    "train/lr": "lr",
    "train/mean_gen_tokens_per_sample": "length/mean",
    "train/gen_kl_error": "mismatch/kl",
    # Unlike the embedded engine's, it includes the validation and the checkpoint after the step.
    "timing/train/total_step_time": "time/step",
    "validation/avg_length": "validation/num_tokens",
}
"""NeMo-RL's metric -> the embedded engine's name for it. `train/approx_entropy` keeps its name: it is an
estimate from the sampled tokens, not the exact `entropy/mean`."""


def name_of(prefix: str, name: str) -> str:
    """Name a logged metric in metrics.jsonl; a variant's own names, which have a slash, stay."""
    if prefix == "train" and "/" in name:
        return name
    full_name = f"{prefix}/{name}" if prefix else name
    return OUR_NAMES.get(full_name, full_name)


@contextmanager
def locked_run_folders(recipe: Recipe) -> Iterator[None]:
    """Lock a run's folders within the block, so that no other run of either engine writes into them.

    A lock ends with the process that holds it, or with its node, so a dead job does not block a resume.
    """
    paths = [recipe.run_dir]
    if recipe.checkpointing.enabled:
        paths.append(recipe.checkpoint_dir)
    with ExitStack() as locks:
        for path in paths:
            folder = locks.enter_context(closing(RunFolder(path)))
            folder.path.mkdir(parents=True, exist_ok=True)
            folder.lock()
        yield


class RunRecord(Callback):
    """Passes what NeMo-RL logs to the run's folder, in the embedded engine's format.

    Its files are ``metrics.jsonl``, in which a step may have several rows, ``versions.json`` and
    ``recipe.resolved.yaml``.
    """

    def __init__(self, recipe: Recipe) -> None:
        # NeMo-RL's own environments do not use nemo_grpo.rewards, and may have no reward components.
        weights = None if recipe.nemo_grpo.task is None else recipe.nemo_grpo.rewards
        self.watch = Watch(recipe.grpo.max_num_steps, weights)
        newest = newest_checkpoint(recipe.checkpoint_dir)
        from_step = step_of(newest) if newest else -1
        checkpoints = recipe.checkpoint_dir if recipe.checkpointing.enabled else None
        # `open` would also lock the folder and start trackers. `locked_run_folders` already holds the locks,
        # and NeMo-RL starts the trackers.
        self.run = RunFolder(recipe.run_dir, checkpoints=checkpoints)
        self.run.begin_record(recipe.to_yaml(), recipe.own_files, from_step)
        keep_inputs(self.run.path, data_files(recipe), begins=from_step < 0)

    def on_metrics(self, metrics: Mapping[str, Any], step: int, prefix: str) -> None:
        """Write a row of all numbers."""
        row: dict[str, Any] = {"step": step}
        for name, value in metrics.items():
            # NeMo-RL also logs texts, lists and histograms, which metrics.jsonl cannot hold.
            is_scalar_tensor = getattr(value, "ndim", None) == 0
            if isinstance(value, Real) or is_scalar_tensor:
                row[name_of(prefix, name)] = float(value)
        self.run.append_metrics(row)
        if self.run.failure:
            # NeMo-RL's loop never asks a callback whether to go on: only an error stops a run whose metrics
            # can no longer be written.
            raise OSError(self.run.failure)
        self._report(row, step, prefix)

    def _report(self, row: Mapping[str, Any], step: int, prefix: str) -> None:
        """Write a validation's note, and warnings about a run that learns nothing, to the log."""
        note = validation_note(row) if prefix == "validation" else ""
        if note:
            log.info("step %d: %s", step, note)
        if SIGNAL in row:
            for sentence in self.watch(row):
                log.warning("%s", sentence)
