"""Keys of a recipe that decide a run's results, and keys that a continued run may change.

Each section declares that beside its fields, by two class variables:

PLACES   fields, or whole sections, that place a run: layout, batching, files. They change no result.
EXTENDS  fields that set how long a run trains and how it is validated.
"""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from nemo_grpo.recipe.recipe import Recipe
from nemo_grpo.support.dotted import leaves, parents


def deciding_settings(recipe: Recipe, *, may_extend: bool) -> dict[str, Any]:
    """Return the resolved recipe without what places the run: dotted key -> value.

    Args:
        recipe: The recipe.
        may_extend: Leave out what sets the run's length and validation, too.
    """
    may_change = set(_declared(recipe, "PLACES"))
    if may_extend:
        may_change |= set(_declared(recipe, "EXTENDS"))
    settings = leaves(recipe.to_dict())
    # A declared section may change with everything in it.
    return {key: value for key, value in settings if may_change.isdisjoint((key, *parents(key)))}


def _declared(section: BaseModel, kind: str, prefix: str = "") -> Iterator[str]:
    """Yield the keys that a section and those within it declare."""
    # A variant, a task or a prompt declares none: each of its parameters decides the results.
    for name in getattr(section, kind, ()):
        yield f"{prefix}{name}"
    for name, value in section:
        if isinstance(value, BaseModel):
            yield from _declared(value, kind, f"{prefix}{name}.")
