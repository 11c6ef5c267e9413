"""Refuses what cannot be rehearsed before anything starts; does not import torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_grpo.errors import UserError
from nemo_grpo.recipe.host import has_images
from nemo_grpo.rehearsal.host import refuse_data, uses_async_engine

if TYPE_CHECKING:
    from nemo_grpo.recipe import Recipe
    from nemo_grpo.rehearsal.environment import Stack


def refuse(recipe: Recipe, path: Path, stack: Stack) -> None:
    """Refuse a recipe that cannot be rehearsed.

    Raises: UserError: an embedded recipe, images without torchvision, asynchronous rollouts without vLLM.
    """
    if recipe.nemo_grpo.target != "cluster":
        raise UserError(
            f"nemo_grpo.target={recipe.nemo_grpo.target}: {path} is for the embedded engine, which runs here "
            "unchanged; use nemo-grpo train"
        )
    if recipe.nemo_grpo.task is None:
        refuse_data(recipe)
    if has_images(recipe) and stack.torchvision is None:
        raise UserError(
            f"{path}: images are processed by torchvision's Python code, and neither environment has it; "
            "run make venv-nemo-rl, or name its folder with TORCHVISION_FOLDER"
        )
    if uses_async_engine(recipe) and stack.vllm_python is None:
        raise UserError(
            "asynchronous rollouts need vLLM: the stand-in sampler has no asynchronous engine; run make "
            "venv-vllm and leave --sampler out"
        )


def for_recipe(stack: Stack, recipe: Recipe) -> Stack:
    """The stack with what the recipe's prompts need."""
    return replace(stack, sees_images=has_images(recipe))
