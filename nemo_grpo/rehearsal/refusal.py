"""What cannot be rehearsed, told before anything starts; no torch in here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nemo_grpo.errors import UserError

if TYPE_CHECKING:
    from nemo_grpo.recipe import Recipe


def refuse(recipe: Recipe, path: Path) -> None:
    """Raise for what cannot be rehearsed.

    Raises: UserError: a recipe of the embedded engine, or a task with images.
    """
    if recipe.nemo_grpo.target != "cluster":
        raise UserError(
            f"nemo_grpo.target={recipe.nemo_grpo.target}: {path} is for the embedded engine, which runs here "
            "as it is; use nemo-grpo train"
        )
    task = recipe.nemo_grpo.task
    if task.needs_images:
        raise UserError(
            f"nemo_grpo.task.name={task.name}: a rehearsal has no small model that sees images; use recipe "
            "check and plan, and look closely at the first step on a GPU"
        )
