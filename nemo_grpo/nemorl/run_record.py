"""Files of a run on NeMo-RL, in addition to NeMo-RL's own logs, for `nemo-grpo report`.

``metrics.jsonl``, ``versions.json`` and ``recipe.resolved.yaml``, as the embedded engine writes them; a step
may have several rows.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from typing import Any

from nemo_grpo.diagnostics.runs import METRICS_FILE
from nemo_grpo.diagnostics.stuck import SIGNAL, Watch
from nemo_grpo.nemorl.observers import listening
from nemo_grpo.recipe import Recipe
from nemo_grpo.training.inputs import data_files, keep_inputs
from nemo_grpo.training.run_folder import RunFolder, newest_checkpoint, step_of

log = logging.getLogger(__name__)

OUR_NAMES = {
    "train/reward": "reward/mean",
    "train/loss": "loss/total",
    "train/grad_norm": "grad_norm",
    "train/lr": "lr",
    "train/mean_gen_tokens_per_sample": "length/mean",
    "train/gen_kl_error": "mismatch/kl",
    "timing/train/total_step_time": "time/step",  # with the validation and the checkpoint after the step
    "validation/avg_length": "validation/num_tokens",
}
"""NeMo-RL's metric -> the embedded engine's name for it. `train/approx_entropy` keeps its name: it is an
estimate from the sampled tokens, not the exact `entropy/mean`."""


def name_of(prefix: str, name: str) -> str:
    """A logged metric's name in metrics.jsonl; a variant's own names, which have a slash, stay."""
    if prefix == "train" and "/" in name:
        return name
    full = f"{prefix}/{name}" if prefix else name
    return OUR_NAMES.get(full, full)


@contextmanager
def alone(recipe: Recipe) -> Iterator[None]:
    """Within the block no other run, on either engine, can use the folders of this one.

    The locks end with the process that holds them, or with its node: a dead job stops no resume.

    Raises: UserError: another run is using one of them.
    """
    paths = [recipe.run_dir, *([recipe.checkpoint_dir] if recipe.checkpointing.enabled else [])]
    folders = [RunFolder(path) for path in paths]
    try:
        for folder in folders:
            folder.path.mkdir(parents=True, exist_ok=True)
            folder.lock()
        yield
    finally:
        for folder in folders:
            folder.close()


@contextmanager
def record_run(recipe: Recipe, logger: Any) -> Iterator[None]:
    """Within the block, also write everything that NeMo-RL's ``logger`` receives."""
    folder, newest = recipe.run_dir, newest_checkpoint(recipe.checkpoint_dir)
    from_step = step_of(newest) if newest else -1
    run = RunFolder(folder, checkpoints=recipe.checkpoint_dir if recipe.checkpointing.enabled else None)
    run.keep_settings(recipe.to_yaml(), recipe.own_files, from_step)
    keep_inputs(folder, data_files(recipe), begins=from_step < 0)
    watch = Watch(recipe.grpo.max_num_steps)

    def record(metrics: Mapping[str, Any], step: int, prefix: str) -> None:
        row = {
            name_of(prefix, name): float(value)
            for name, value in metrics.items()
            if isinstance(value, Real) or getattr(value, "ndim", None) == 0
        }
        with (folder / METRICS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **row}) + "\n")
        for sentence in watch({"step": step, **row}) if SIGNAL in row else ():
            log.warning("%s", sentence)

    with listening(logger, told=record):
        yield
