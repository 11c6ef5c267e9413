"""Side files of NeMo-RL's Megatron checkpoints: tokenizer, configuration, the variant's statistics."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_grpo.errors import UserError
from nemo_grpo.nemorl import hooks

if TYPE_CHECKING:
    from nemo_grpo.nemorl.exchange import StepExchange
    from nemo_grpo.variants.base import VariantConfig

SIDE_FOLDER = Path("policy") / "tokenizer"
"""Where in ``step_N``: config.json, tokenizer and chat template; the converters' --hf-config."""
CARRIED = "nemo_grpo.json"
"""File in ``step_N``: what the variant carries from step to step; only for a variant that does."""


def save_side_files(
    checkpointer: Any, tokenizer: Any, model_config: Any, exchange: StepExchange | None = None
) -> None:
    """From now on, put tokenizer and configuration into every checkpoint that ``checkpointer`` begins.

    Args: checkpointer: NeMo-RL's `CheckpointManager`.  tokenizer: a tokenizer or processor.
          model_config: transformers' configuration of the model.  exchange: its ``carried`` goes there, too.
    """
    generation_config = _generation_config(model_config.name_or_path)

    def add(folder: Path) -> None:
        side = folder / SIDE_FOLDER
        side.mkdir(parents=True, exist_ok=True)
        model_config.save_pretrained(side)
        if generation_config is not None:
            generation_config.save_pretrained(side)
        tokenizer.save_pretrained(side)
        if exchange is not None and exchange.carried:
            (folder / CARRIED).write_text(json.dumps(exchange.carried))

    def adding(begin: Callable[..., Any]) -> Callable[..., Any]:
        def init_tmp_checkpoint(*arguments: Any, **named: Any) -> Any:
            folder = begin(*arguments, **named)
            add(Path(folder))
            return folder

        return init_tmp_checkpoint

    hooks.install("checkpoint begun", adding, checkpointer)


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
