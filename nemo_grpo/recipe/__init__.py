"""Recipes: NeMo-RL configs with ``loss_fn.variant`` and the section ``nemo_grpo``, validated as a whole.

`loader` reads the YAML files, `interpolation` resolves references, `recipe` has the class of the validated
object, and `validation` puts these steps together. Rules about settings are rows of tables (`rows`, `tables`)
or functions (`registry`).
"""

from nemo_grpo.recipe.recipe import Recipe
from nemo_grpo.recipe.validation import advice, load_recipe, load_recipe_dict, refuse_unsupported

__all__ = ["Recipe", "advice", "load_recipe", "load_recipe_dict", "refuse_unsupported"]
