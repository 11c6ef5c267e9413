"""Recipes: a NeMo-RL config with ``loss_fn.variant`` and one section of our own, validated as a whole."""

from nemo_grpo.recipe.recipe import Recipe
from nemo_grpo.recipe.validation import advice, load_recipe, load_recipe_dict, refuse_unsupported

__all__ = ["Recipe", "advice", "load_recipe", "load_recipe_dict", "refuse_unsupported"]
