"""NeMo-RL's Megatron checkpoints: the side files that the driver adds, and resuming from them.

NeMo-RL's CheckpointManager writes, ranks and removes them, and its trainers take no other, so
`engine.checkpoint_store` has no part in it. Both engines' checkpoints have one layout.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from checkpoints_conv.formats.torch_dist import TorchDistReader
from nemo_grpo.nemorl.callbacks import Callback
from nemo_grpo.nemorl.compat import rebind
from nemo_grpo.nemorl.step_context import StepContext
from nemo_grpo.recipe import Recipe
from nemo_grpo.run.folder import SIDE_FOLDER
from nemo_grpo.support.errors import UserError
from nemo_grpo.variants.base import VariantConfig

log = logging.getLogger(__name__)

CARRIED = "nemo_grpo.json"
"""File in ``step_N`` of the statistics that a variant carries from step to step."""


class SideFiles(Callback):
    """Puts tokenizer, configuration and the variant's statistics into every checkpoint."""

    def __init__(self, tokenizer: Any, model_config: Any, context: StepContext | None = None) -> None:
        """Args: tokenizer: or a processor.  model_config: transformers' configuration of the model.
        context: its ``carried`` is saved.
        """
        from transformers import GenerationConfig

        self.sources = [model_config, tokenizer]
        self.context = context or StepContext()
        with suppress(OSError):  # it has none
            self.sources.insert(1, GenerationConfig.from_pretrained(model_config.name_or_path))

    def on_checkpoint(self, folder: Path) -> None:
        """Save them in a checkpoint."""
        side = folder / SIDE_FOLDER
        side.mkdir(parents=True, exist_ok=True)
        for source in self.sources:
            source.save_pretrained(side)
        if self.context.carried:
            (folder / CARRIED).write_text(json.dumps(self.context.carried))


def resume_carried(config: VariantConfig, checkpointer: Any, context: StepContext) -> None:
    """Read the variant's statistics from the newest checkpoint into ``context``."""
    newest = checkpointer.get_latest_checkpoint_path()
    if newest is None or not config.carries_statistics:
        return
    path = Path(newest) / CARRIED
    try:
        context.carried = dict(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise UserError(
            f"loss_fn.variant={config.variant} carries statistics over steps, and {path} has none ({error}); "
            "resume with the loss_fn that the run was started with, or start another run"
        ) from None


Paths = tuple[Path | None, Path | None]


def resume_with_optimizer(recipe: Recipe) -> None:
    """Let NeMo-RL's checkpoint manager find every optimizer that a Megatron checkpoint holds.

    NeMo-RL 0.7.0 looks for the optimizer's state in ``common.pt``, which megatron-core 0.19 and newer no
    longer write (Megatron-LM PR 5160). It would warn once and load the weights alone, losing Adam's moments,
    the FP32 weights and the schedule's position. NeMo-RL 7ea279abf asks megatron-core instead.

    A run that saves its optimizer but would resume without one is refused by a UserError from NeMo-RL's
    `setup`: it would silently become a different run.
    """

    def find(theirs: Callable[..., Paths]) -> Any:
        def get_resume_paths(*arguments: Any, **named: Any) -> Paths:
            if not recipe.policy.megatron_cfg.enabled:  # a file of its own, which NeMo-RL finds
                return theirs(*arguments, **named)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # "Optimizer will be freshly initialized"
                weights, optimizer = theirs(*arguments, **named)
            is_required = recipe.checkpointing.save_optimizer
            return weights, optimizer or optimizer_of(weights, is_required=is_required)

        return staticmethod(get_resume_paths)

    rebind("resume", find)


def optimizer_of(weights: Path | None, *, is_required: bool) -> Path | None:
    """Find the path that tells NeMo-RL's Megatron workers that ``weights`` includes an optimizer.

    Args:    weights: ``step_N/policy/weights``; None: the run begins.
    """
    if weights is None:
        return None
    reader = TorchDistReader(Path(weights))
    has_optimizer = reader.has_optimizer
    reader.close()
    if has_optimizer:
        return Path(weights).with_name("optimizer")
    if is_required:
        raise UserError(
            f"checkpointing.save_optimizer=true, but {weights} has no optimizer state: training would "
            "continue with Adam's moments at 0 and the learning rate's schedule at its start; set it to "
            "false to accept that"
        )
    log.warning("%s has no optimizer state: optimizer and schedule start from zero", weights)
    return None
