"""Recipes: a NeMo-RL config with ``loss_fn.variant`` and one section of our own, validated as a whole."""

from nemo_grpo.recipe.recipe import Recipe, load_recipe, load_recipe_dict

__all__ = ["Recipe", "load_recipe", "load_recipe_dict"]
