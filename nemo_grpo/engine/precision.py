"""Precision of a run: resolves ``auto``, and warns where BF16 is slow on this processor."""

import logging

import torch

from nemo_grpo.recipe import Recipe
from nemo_grpo.support import processor

log = logging.getLogger(__name__)


def choose_precision(
    recipe: Recipe, device: torch.device, width: int, begun: Recipe | None, *, leads: bool
) -> Recipe:
    """Replace ``auto`` in the recipe by a precision.

    Args: width: the model's hidden size.  begun: what a run that resumes began with; it keeps its precision.
          leads: this rank says what it found.
    """
    asked, on_gpu = recipe.policy.precision, device.type == "cuda"
    if asked == "auto" and begun is not None:
        precision: str = begun.policy.precision
    else:
        precision = "bfloat16" if asked == "auto" and on_gpu else processor.precision(asked, width)
    if leads and asked == "auto":
        log.info("policy.precision=auto: %s", precision)
    if leads and precision == "bfloat16" and not (on_gpu or processor.has_bf16()):
        log.warning(
            "policy.precision=bfloat16: this processor has no BF16 instructions; on one like it BF16 "
            "products took 6 to 10 times as long as FP32's: use auto or float32 in a new run"
        )
    return recipe.with_precision(precision)
