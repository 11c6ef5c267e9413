"""From a file or a mapping to a validated recipe, with errors in the recipe's own terms."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from nemo_grpo.recipe import cluster_rules, host, rules  # noqa: F401 - they register
from nemo_grpo.recipe.keys import dotted_key_errors, shown, unknown_key_errors, unknown_key_message
from nemo_grpo.recipe.loader import Tree, Written, from_environment, merge, read, resolve
from nemo_grpo.recipe.megatron_sections import WITHOUT_RULES
from nemo_grpo.recipe.recipe import Recipe
from nemo_grpo.recipe.registry import Scope
from nemo_grpo.recipe.registry import messages as function_messages
from nemo_grpo.recipe.tables import table_messages
from nemo_grpo.support.dotted import is_missing, set_value, value_of
from nemo_grpo.support.errors import UserError

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
"""A missing key -> the key whose value it takes, in this order."""


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Read, merge, resolve and validate a recipe.

    Args:    path: YAML file.  overrides: ``key=value``, ``++key=value`` or ``~key``, applied before
             interpolation, so that dependent values follow.
    Returns: the recipe.
    Raises:  UserError: all errors that can be found at once.
    """
    return _load(read(path, overrides))


def load_recipe_dict(tree: Mapping[str, Any], overrides: Iterable[str] = ()) -> Recipe:
    """As `load_recipe`, from a nested mapping without ``defaults``.

    Raises: UserError: as `load_recipe`.
    """
    return _load(Written(dict(tree), {}).with_overrides(overrides))


def _load(written: Written) -> Recipe:
    host.refuse_other_algorithms(written.tree)
    resolved = resolve(written.tree)
    return _validated(resolved, written).with_references(_references(resolved, written.tree))


def _validated(tree: Tree, written: Written) -> Recipe:
    if errors := dotted_key_errors(tree):
        raise RecipeErrors(errors)
    tree, notes = host.adapted(tree, written.is_stock)
    errors, filled = unknown_key_errors(tree), _with_derived_defaults(tree)
    try:
        recipe = Recipe.model_validate(filled)
    except ValidationError as error:
        errors += [_explain(detail) for detail in error.errors()]
        copied = tuple(f"{key}=" for key in DERIVED_DEFAULTS if value_of(tree, key) is None)
        errors = [e for e in errors if not e.startswith(copied)] or errors
        try:
            recipe = Recipe.model_validate(filled, context=WITHOUT_RULES)
        except ValidationError:
            raise RecipeErrors(errors) from None
    errors += messages(Scope.ALL, recipe)
    if recipe.nemo_grpo.target == "cluster":
        errors += messages(Scope.CLUSTER, recipe)
        errors += messages(Scope.MEGATRON, recipe) if recipe.policy.megatron_cfg.enabled else []
        (notes if recipe.nemo_grpo.task is None else errors).extend(messages(Scope.CARE, recipe))
    if errors:
        raise RecipeErrors(errors)
    recipe._notes, recipe._settings = tuple(notes), tree
    return recipe


def messages(scope: Scope, recipe: Recipe) -> list[str]:
    """Messages of a scope's rows and functions about a recipe."""
    return [*table_messages(scope, recipe), *function_messages(scope, recipe)]


def advice(recipe: Recipe) -> list[str]:
    """Settings that a variant replaces, or that are probably not meant, one sentence each."""
    return [*recipe.notes, *messages(Scope.ADVICE, recipe)]


def refuse_unsupported(recipe: Recipe, scope: Scope = Scope.EMBEDDED) -> None:
    """Refuse what the embedded engine cannot train, or what the rules of another scope refuse.

    Raises: UserError: naming key, value and remedy.
    """
    if errors := messages(scope, recipe):
        raise RecipeErrors(errors)


class RecipeErrors(UserError):
    """Everything that is wrong with a recipe: ``errors``, one message each."""

    def __init__(self, errors: list[str]) -> None:
        self.errors = errors
        listed = "".join(f"\n  {error}" for error in errors)
        super().__init__(errors[0] if len(errors) == 1 else f"{len(errors)} errors in the recipe:{listed}")


class Settings(NamedTuple):
    """A recipe's settings, valid or not.

    Attributes: tree: every value that is known: of a valid recipe all of them.  references: what is shown in
                place of texts from the environment, see `loader.from_environment`.  errors: messages.
    """

    tree: Tree
    references: Tree
    errors: list[str]


def settings_of(path: str | Path, overrides: Iterable[str] = ()) -> Settings:
    """Read a recipe that may be invalid.

    Raises: UserError: the file cannot be read, or an override or interpolation cannot be carried out.
    """
    written = read(path, overrides)
    host.refuse_other_algorithms(written.tree)
    tree = resolve(written.tree)
    references = _references(tree, written.tree)
    try:
        return Settings(_validated(tree, written).to_dict(), references, [])
    except RecipeErrors as error:
        return Settings(_with_derived_defaults(tree), references, error.errors)


def _references(tree: Tree, given: Tree) -> Tree:
    """`from_environment`, with the keys that `DERIVED_DEFAULTS` copies.

    Args: tree: ``given``, resolved.
    """
    references = from_environment(given)
    for key, source in DERIVED_DEFAULTS.items():
        if (reference := value_of(references, source)) is not None and is_missing(tree, key):
            set_value(references, key, reference)
    return references


def _with_derived_defaults(tree: Tree) -> Tree:
    """Fill in missing keys by `DERIVED_DEFAULTS`; the model reports wrong types."""
    filled = merge({}, tree)
    for key, source in DERIVED_DEFAULTS.items():
        if key.startswith("loss_fn.") and value_of(filled, "loss_fn.variant") is None:  # NeMo-RL's own loss
            continue
        if (value := value_of(filled, source)) is not None and is_missing(filled, key):
            set_value(filled, key, value)
    return filled


_TYPE_NAMES = {
    type(None): "null",
    bool: "a boolean",
    int: "an integer",
    float: "a float",
    str: "a text",
    list: "a list",
}

_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a text",
    "list_type": "a list",
    "dict_type": "a section of keys",
    "model_type": "a section of keys",
    "model_attributes_type": "a section of keys",
    "literal_error": "one of {expected}",
    "greater_than": "greater than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "string_too_short": "a non-empty text",
    "finite_number": "a finite number",
}


def _explain(error: ErrorDetails) -> str:
    """One pydantic error as ``key=value: rule; remedy``."""
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
        got = f" is {_TYPE_NAMES.get(type(error['input']), 'a section')}; it" if is_type else ""
        return f"{key}={shown(error['input'])}{got} must be {_EXPECTED[kind].format(**context)}"
    message = error["msg"].removeprefix("Value error, ")
    if isinstance(error["input"], Mapping):  # a section's own rule: the message begins with the key in it
        return f"{key}.{message}"
    return f"{key}={shown(error['input'])}: {message}"
