"""An optimizer that a resumed run does not find in its checkpoint.

NeMo-RL 0.7.0 looks for the optimizer's state in ``common.pt``, which megatron-core 0.19 and newer no longer
write. It would warn once and load the weights alone, losing Adam's moments, the FP32 weights and the
schedule's position. NeMo-RL 7ea279abf asks megatron-core instead.

Upstream: Megatron-LM pull request 5160.
Versions: NeMo-RL 0.7.0.
Needed while: tests/nemo_rl/test_workarounds.py::test_nemo_rl_finds_no_optimizer_in_a_newer_checkpoint
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoints_conv.formats.torch_dist import TorchDistReader
from nemo_grpo.nemorl.compat import rebind
from nemo_grpo.recipe import Recipe
from nemo_grpo.support.errors import UserError

log = logging.getLogger(__name__)

Paths = tuple[Path | None, Path | None]


def resume_with_optimizer(recipe: Recipe) -> None:
    """Let NeMo-RL's checkpoint manager find every optimizer that a Megatron checkpoint holds.

    With every version, NeMo-RL's `setup` raises a UserError if a run that saves its optimizer would resume
    without one, because it would silently become a different run.
    """

    def also_in_megatron_checkpoints(find_as_nemo_rl: Callable[..., Paths]) -> Any:
        def get_resume_paths(*arguments: Any, **named: Any) -> Paths:
            if not recipe.policy.megatron_cfg.enabled:
                # DTensor's optimizer is a file of its own, which NeMo-RL finds.
                return find_as_nemo_rl(*arguments, **named)
            with warnings.catch_warnings():
                # "Optimizer will be freshly initialized", which is no longer true.
                warnings.simplefilter("ignore", UserWarning)
                weights, optimizer = find_as_nemo_rl(*arguments, **named)
            if optimizer is None:
                optimizer = optimizer_of(weights, is_required=recipe.checkpointing.save_optimizer)
            return weights, optimizer

        return staticmethod(get_resume_paths)

    rebind("resume", also_in_megatron_checkpoints)


def optimizer_of(weights: Path | None, *, is_required: bool) -> Path | None:
    """Find the path that tells NeMo-RL's Megatron workers that ``weights`` includes an optimizer.

    Args:
        weights: ``step_N/policy/weights``; None: the run begins.
        is_required: refuse weights without an optimizer instead of warning.
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
