"""Keys of a recipe that decide a run's results, and keys that a continued run may change.

Each section declares the keys that may change in two class variables beside its fields:

PLACES   fields or whole sections that do not change the results: layout, batching, folders.
EXTENDS  fields that set how long a run trains and how it is validated.
"""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from nemo_grpo.recipe.recipe import Recipe
from nemo_grpo.support.dotted import leaves, parents


def deciding_settings(recipe: Recipe, *, may_extend: bool) -> dict[str, Any]:
    """Return the settings that decide a run's results, by dotted key.

    Args:
        recipe: The recipe.
        may_extend: True to leave out the settings of the run's length and validation, too.
    """
    may_change = set(_declared(recipe, "PLACES"))
    if may_extend:
        may_change |= set(_declared(recipe, "EXTENDS"))
    settings = leaves(recipe.to_dict())
    # If a section is declared, all keys in it may change.
    return {key: value for key, value in settings if may_change.isdisjoint((key, *parents(key)))}


def _declared(section: BaseModel, kind: str, prefix: str = "") -> Iterator[str]:
    """Yield the keys that a section and the sections within it declare.

    Args:
        section: A section of the recipe, or the whole recipe.
        kind: ``PLACES`` or ``EXTENDS``.
        prefix: Dotted key of the section, with a dot at the end.
    """
    # Variants, tasks and prompts declare nothing: each of their parameters decides the results.
    for name in getattr(section, kind, ()):
        yield f"{prefix}{name}"
    for name, value in section:
        if isinstance(value, BaseModel):
            yield from _declared(value, kind, f"{prefix}{name}.")
