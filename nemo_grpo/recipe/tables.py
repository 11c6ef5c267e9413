"""The rows of all tables of rules about recipes, and their messages about one recipe."""

from functools import cache

from nemo_grpo.recipe import (
    care_limits,
    cluster_limits,
    cluster_relations,
    controller_limits,
    embedded_support,
    limits,
    relations,
)
from nemo_grpo.recipe.recipe import Recipe
from nemo_grpo.recipe.registry import Scope
from nemo_grpo.recipe.rows import Row

ROWS: tuple[Row, ...] = (
    *limits.ROWS,
    *embedded_support.ROWS,
    *cluster_limits.ROWS,
    *care_limits.ROWS,
    *controller_limits.ROWS,
    *relations.ROWS,
    *cluster_relations.ROWS,
)
"""Every row, in the order of their messages."""


@cache
def rows(scope: Scope) -> tuple[Row, ...]:
    """List the rows of one scope."""
    return tuple(row for row in ROWS if row.where is scope)


def table_messages(scope: Scope, recipe: Recipe) -> list[str]:
    """List a message for each row that a recipe breaks."""
    messages = [row.message(recipe) for row in rows(scope)]
    return [message for message in messages if message is not None]
