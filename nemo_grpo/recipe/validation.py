"""Loads and validates recipes; errors are in the recipe's own terms."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from nemo_grpo.recipe import cluster_rules, host, rules  # noqa: F401 - they register
from nemo_grpo.recipe.interpolation import Resolved, Tree, resolve
from nemo_grpo.recipe.keys import dotted_key_errors, model_keys, unknown_key_errors, unknown_key_message
from nemo_grpo.recipe.loader import Written, merge, read
from nemo_grpo.recipe.recipe import Recipe
from nemo_grpo.recipe.registry import Scope
from nemo_grpo.recipe.registry import messages as function_messages
from nemo_grpo.recipe.schema import EXPECTED, kind_named, type_errors
from nemo_grpo.recipe.tables import table_messages
from nemo_grpo.support.dotted import is_missing, leaves, set_value, value_of
from nemo_grpo.support.errors import UserError, shown

DERIVED_DEFAULTS = {
    "policy.tokenizer.name": "policy.model_name",
    "policy.logprob_batch_size": "policy.train_micro_batch_size",
    "policy.generation_batch_size": "policy.train_global_batch_size",
    "policy.generation.val_temperature": "policy.generation.temperature",
    "policy.generation.val_top_p": "policy.generation.top_p",
    "policy.generation.val_top_k": "policy.generation.top_k",
    "policy.generation.vllm_cfg.max_model_len": "policy.max_total_sequence_length",
    "policy.make_sequence_length_divisible_by": "policy.megatron_cfg.tensor_model_parallel_size",
    "policy.megatron_cfg.optimizer.clip_grad": "policy.max_grad_norm",
    "policy.megatron_cfg.scheduler.start_weight_decay": "policy.megatron_cfg.optimizer.weight_decay",
    "policy.megatron_cfg.scheduler.end_weight_decay": "policy.megatron_cfg.optimizer.weight_decay",
    "grpo.reward_shaping.max_response_length": "policy.generation.max_new_tokens",
    "loss_fn.max_response_length": "policy.generation.max_new_tokens",
    "nemo_grpo.evaluation.num_problems": "grpo.max_val_samples",
    "nemo_grpo.evaluation.num_samples": "grpo.val_num_generations_per_prompt",
    "nemo_grpo.evaluation.temperature": "policy.generation.val_temperature",
    "nemo_grpo.evaluation.top_p": "policy.generation.val_top_p",
}
"""Missing key -> the key whose value it takes, in this order."""
MAPPING = "a mapping"
"""Value in `Written.given` of a key that no file gave."""
FOLLOW_VAL_PERIOD = ("val_at_start", "val_at_end")
"""Keys of ``grpo`` whose null means true if grpo.val_period is above 0."""

DECLARED = frozenset(key for key, _ in model_keys(Recipe)).union(("loss_fn", "nemo_grpo"))
"""Keys that our models type; NeMo-RL's schema types the others."""


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Read, merge, resolve and validate a recipe.

    Args:    path: YAML file.  overrides: ``key=value``, ``++key=value`` or ``~key``, applied before
             interpolation, so that dependent values follow.
    Returns: the recipe.
    Raises:  UserError: all errors that can be found at once.
    """
    return _load(read(path, overrides))


def load_recipe_dict(tree: Mapping[str, Any], overrides: Iterable[str] = ()) -> Recipe:
    """Validate a nested mapping without ``defaults`` like `load_recipe`."""
    given = {key: MAPPING for key, _ in leaves(tree)}
    return _load(Written(dict(tree), given, order=(MAPPING,)).with_overrides(overrides))


def _load(written: Written) -> Recipe:
    host.refuse_other_algorithms(written.tree)
    try:
        tree, references = resolve(written.tree)
    except UserError as error:
        # A misspelt key often is the reason: policy.model_name_or_path leaves model_name at the base's ???.
        if unknown := unknown_key_errors(written.tree):
            raise RecipeErrors([*unknown, str(error)]) from None
        raise
    known = Resolved(_with_derived_defaults(tree, references), references)
    if errors := dotted_key_errors(tree):
        raise RecipeErrors(errors, known)
    settings, notes = host.adapted(tree, written.is_stock)
    if isinstance(grpo := settings.get("grpo"), dict):
        period = grpo.get("val_period")
        nulls = [name for name in FOLLOW_VAL_PERIOD if grpo.get(name, False) is None]
        grpo |= dict.fromkeys(nulls, isinstance(period, int) and period > 0)
    errors = [*unknown_key_errors(settings), *type_errors(settings, DECLARED)]
    try:
        recipe = Recipe.model_validate(_with_derived_defaults(settings, references))
    except ValidationError as error:
        raise RecipeErrors([*errors, *_type_errors(error, settings)], known) from None
    errors += messages(Scope.ALL, recipe)
    if recipe.nemo_grpo.target == "cluster":
        errors += messages(Scope.CLUSTER, recipe)
        errors += messages(Scope.MEGATRON, recipe) if recipe.policy.megatron_cfg.enabled else []
        (notes if recipe.nemo_grpo.task is None else errors).extend(messages(Scope.CARE, recipe))
    if errors:
        raise RecipeErrors(errors, known)
    recipe._notes, recipe._source = tuple(notes), written
    recipe._settings, recipe._references = settings, references
    return recipe


def _type_errors(error: ValidationError, settings: Tree) -> list[str]:
    """Return a message for each wrong value, but none for its copies through `DERIVED_DEFAULTS`."""
    errors = [_explain(detail) for detail in error.errors()]
    copied = tuple(f"{key}=" for key in DERIVED_DEFAULTS if value_of(settings, key) is None)
    return [message for message in errors if not message.startswith(copied)] or errors


def messages(scope: Scope, recipe: Recipe) -> list[str]:
    """List the messages of a scope's rows and functions about a recipe."""
    return [*table_messages(scope, recipe), *function_messages(scope, recipe)]


def advice(recipe: Recipe) -> list[str]:
    """List settings that a variant replaces, or that are probably not meant, one sentence each."""
    return [*recipe.notes, *messages(Scope.ADVICE, recipe)]


def refuse_unsupported(recipe: Recipe, scope: Scope = Scope.EMBEDDED) -> None:
    """Refuse what the embedded engine cannot train, or what the rules of another scope refuse.

    Raises: UserError: naming key, value and remedy.
    """
    if errors := messages(scope, recipe):
        raise RecipeErrors(errors)


class RecipeErrors(UserError):
    """All errors of a recipe.

    Attributes: errors: one message each.  settings: values as far as they were resolved.
    """

    def __init__(self, errors: list[str], settings: Resolved | None = None) -> None:
        self.errors, self.settings = errors, settings or Resolved({}, {})
        listed = "".join(f"\n  {error}" for error in errors)
        super().__init__(errors[0] if len(errors) == 1 else f"{len(errors)} errors in the recipe:{listed}")


def _with_derived_defaults(tree: Tree, references: Tree) -> Tree:
    """Fill in missing keys by `DERIVED_DEFAULTS`, in ``references`` too; the model reports wrong types."""
    filled = merge({}, tree)
    for key, source in DERIVED_DEFAULTS.items():
        if key.startswith("loss_fn.") and value_of(filled, "loss_fn.variant") is None:  # NeMo-RL's own loss
            continue
        if (value := value_of(filled, source)) is not None and is_missing(filled, key):
            set_value(filled, key, value)
            if (reference := value_of(references, source)) is not None:
                set_value(references, key, reference)
    return filled


_EXPECTED = {
    "int_type": EXPECTED["int"],
    "int_from_float": EXPECTED["int"],
    "float_type": EXPECTED["float"],
    "bool_type": EXPECTED["bool"],
    "string_type": EXPECTED["str"],
    "list_type": EXPECTED["list"],
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), EXPECTED["section"]),
    "literal_error": "one of {expected}",
    "greater_than": "greater than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "string_too_short": "a non-empty text",
    "finite_number": "a finite number",
}


def _explain(error: ErrorDetails) -> str:
    """Write a pydantic error as ``key=value: rule; remedy``."""
    key, kind, context = ".".join(map(str, error["loc"])), error["type"], error.get("ctx", {})
    cause = context.get("error")
    if isinstance(cause, UserError):
        return str(cause)
    if kind == "missing":
        return f"{key} is missing; add it to the recipe"
    if kind == "extra_forbidden":
        return unknown_key_message(key, error["input"])
    if key.endswith(".[key]"):
        return f"{key.removesuffix('.[key]')}: the name must be {_EXPECTED[kind].format(**context)}"
    if kind in _EXPECTED:
        is_type = kind.endswith(("_type", "_from_float"))
        got = f" is {kind_named(error['input'])}; it" if is_type else ""
        return f"{key}={shown(error['input'])}{got} must be {_EXPECTED[kind].format(**context)}"
    message = error["msg"].removeprefix("Value error, ")
    if isinstance(error["input"], Mapping):  # a section's own rule: the message begins with the key in it
        return f"{key}.{message}"
    return f"{key}={shown(error['input'])}: {message}"
