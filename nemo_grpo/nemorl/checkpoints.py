"""Files that the driver adds to NeMo-RL's checkpoints, and reads when a run resumes.

NeMo-RL's CheckpointManager writes, ranks and removes the checkpoints; `engine.checkpoint_store` is not used,
because NeMo-RL's trainers accept only their own manager. Both engines' checkpoints have the same layout.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from nemo_grpo.nemorl.advantage import VariantEstimator
from nemo_grpo.nemorl.callbacks import Callback
from nemo_grpo.run.folder import SIDE_FOLDER
from nemo_grpo.support.errors import UserError
from nemo_grpo.variants.base import VariantConfig

CARRIED = "nemo_grpo.json"
"""File in ``step_N`` of the statistics that a variant carries from step to step."""


class SideFiles(Callback):
    """Puts tokenizer, configuration and the variant's statistics into every checkpoint."""

    def __init__(self, tokenizer: Any, model_config: Any, estimator: VariantEstimator | None = None) -> None:
        """Read the model's generation configuration, if it has one.

        Args:
            tokenizer: the model's, or its processor.
            model_config: transformers' configuration of the model.
            estimator: its ``carried`` statistics are saved; None with NeMo-RL's own loss.
        """
        from transformers import GenerationConfig

        self.sources = [model_config, tokenizer]
        self.estimator = estimator
        # Not every model has a generation_config.json.
        with suppress(OSError):
            self.sources.insert(1, GenerationConfig.from_pretrained(model_config.name_or_path))

    def on_checkpoint(self, folder: Path) -> None:
        """Save tokenizer, configuration and statistics into a checkpoint."""
        side = folder / SIDE_FOLDER
        side.mkdir(parents=True, exist_ok=True)
        for source in self.sources:
            source.save_pretrained(side)
        if self.estimator is not None and self.estimator.carried:
            (folder / CARRIED).write_text(json.dumps(self.estimator.carried))


def carried_statistics(config: VariantConfig, checkpointer: Any) -> dict[str, float]:
    """Read the statistics that a variant carries from step to step from the newest checkpoint.

    Args:
        config: the variant.
        checkpointer: NeMo-RL's.

    Returns:
        Name -> value; {} if the run begins, or the variant carries none.
    """
    newest = checkpointer.get_latest_checkpoint_path()
    if newest is None or not config.carries_statistics:
        return {}
    path = Path(newest) / CARRIED
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise UserError(
            f"loss_fn.variant={config.variant} carries statistics over steps, and {path} has none ({error}); "
            "resume with the loss_fn that the run was started with, or start another run"
        ) from None
