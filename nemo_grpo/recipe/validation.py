"""Loading and validation of recipes, with error messages that name the recipe's keys.

The steps are in `_load`: resolve the interpolations, adapt NeMo-RL's own recipes, check names and types, fill
in defaults, and apply the rules.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

# These modules are imported because they register rules, whose messages come in the order of the imports.
from nemo_grpo.recipe import cluster_rules, host, rules, rules_advice, rules_embedded  # noqa: F401
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
"""Key -> key whose value it takes if it is missing. They are filled in in this order."""
MAPPING = "a mapping"
"""Origin (`Written.origins`) of the keys of a recipe that was not read from a file."""
FOLLOW_VAL_PERIOD = ("val_at_start", "val_at_end")
"""Keys of ``grpo`` whose null means true if grpo.val_period is above 0."""

DECLARED = frozenset(key for key, _ in model_keys(Recipe)).union(("loss_fn", "nemo_grpo"))
"""Keys whose types our models check. NeMo-RL's schema checks the types of all others."""


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Read, merge, resolve and validate a recipe.

    Args:
        path: YAML file, or the name of a shipped recipe.
        overrides: ``key=value``, ``++key=value`` or ``~key``. They are applied before interpolation, so a
            value that refers to an overridden key follows it.
    Raises: UserError: with all errors that can be found at once.
    """
    return _load(read(path, overrides))


def load_recipe_dict(tree: Mapping[str, Any], overrides: Iterable[str] = ()) -> Recipe:
    """Resolve and validate a recipe that is a nested mapping, without ``defaults``."""
    origins = {key: MAPPING for key, _ in leaves(tree)}
    written = Written(dict(tree), origins, order=(MAPPING,))
    return _load(written.with_overrides(overrides))


def _load(written: Written) -> Recipe:
    """Resolve and validate settings."""
    host.refuse_other_algorithms(written.tree)
    tree, references = _resolved(written)
    # `recipe resolve` shows an invalid recipe with the keys that its author used, so this precedes `adapted`.
    shown_with_errors = Resolved(_with_derived_defaults(tree, references), references)
    dotted_errors = dotted_key_errors(tree)
    if dotted_errors:
        raise RecipeErrors(dotted_errors, shown_with_errors)

    settings, notes = host.adapted(tree, written.is_stock)
    _follow_val_period(settings)
    # All errors of names and types are reported together. The rules need a recipe whose types are right.
    errors = unknown_key_errors(settings)
    errors += type_errors(settings, DECLARED)
    try:
        recipe = Recipe.model_validate(_with_derived_defaults(settings, references))
    except ValidationError as error:
        errors += _messages_of(error, settings)
        raise RecipeErrors(errors, shown_with_errors) from None

    errors += messages(Scope.ALL, recipe)
    if recipe.nemo_grpo.target == "cluster":
        errors += messages(Scope.CLUSTER, recipe)
        if recipe.policy.megatron_cfg.enabled:
            errors += messages(Scope.MEGATRON, recipe)
        # In a NeMo-RL recipe (without a task) the user may have chosen such a setting, so it is only a note.
        if recipe.nemo_grpo.task is None:
            notes += messages(Scope.CARE, recipe)
        else:
            errors += messages(Scope.CARE, recipe)
    if errors:
        raise RecipeErrors(errors, shown_with_errors)
    recipe.keep_origin(written, settings, references, notes)
    return recipe


def _resolved(written: Written) -> Resolved:
    """Resolve the interpolations. An error of that comes together with the errors of unknown keys."""
    try:
        return resolve(written.tree)
    except UserError as error:
        # A misspelt key is often the reason. For example, policy.model_name_or_path leaves model_name at the
        # ??? of the base.
        unknown = unknown_key_errors(written.tree)
        if unknown:
            raise RecipeErrors([*unknown, str(error)]) from None
        raise


def _follow_val_period(settings: Tree) -> None:
    """Replace null by its meaning in the keys of `FOLLOW_VAL_PERIOD`, in place."""
    section = settings.get("grpo")
    if not isinstance(section, dict):
        return
    val_period = section.get("val_period")
    validates = isinstance(val_period, int) and val_period > 0
    for name in FOLLOW_VAL_PERIOD:
        if name in section and section[name] is None:
            section[name] = validates


def _messages_of(error: ValidationError, settings: Tree) -> list[str]:
    """Return a message for each wrong value, but none for keys that took it from `DERIVED_DEFAULTS`."""
    messages = [_explain(detail) for detail in error.errors()]
    derived_keys = tuple(f"{key}=" for key in DERIVED_DEFAULTS if value_of(settings, key) is None)
    about_written_values = [message for message in messages if not message.startswith(derived_keys)]
    # A value may be valid for the key that was written and wrong only for a derived key, whose range is
    # stricter. Then the messages about the derived key are returned.
    return about_written_values or messages


def messages(scope: Scope, recipe: Recipe) -> list[str]:
    """Apply the rules of a scope, rows and functions, to a recipe, and list their messages."""
    return [*table_messages(scope, recipe), *function_messages(scope, recipe)]


def advice(recipe: Recipe) -> list[str]:
    """List warnings: settings that the variant replaces, and settings that are probably a mistake."""
    return [*recipe.notes, *messages(Scope.ADVICE, recipe)]


def refuse_unsupported(recipe: Recipe, scope: Scope = Scope.EMBEDDED) -> None:
    """Refuse a recipe that breaks a rule of a scope; by default, one that the embedded engine cannot train.

    Raises: UserError: with key, value and remedy.
    """
    errors = messages(scope, recipe)
    if errors:
        raise RecipeErrors(errors)


class RecipeErrors(UserError):
    """All errors of a recipe.

    Attributes:
        errors: Messages, one for each error.
        settings: Settings of the recipe, as far as they could be resolved.
    """

    def __init__(self, errors: list[str], settings: Resolved | None = None) -> None:
        self.errors = errors
        self.settings = settings if settings is not None else Resolved({}, {})
        if len(errors) == 1:
            message = errors[0]
        else:
            lines = "".join(f"\n  {error}" for error in errors)
            message = f"{len(errors)} errors in the recipe:{lines}"
        super().__init__(message)


def _with_derived_defaults(tree: Tree, references: Tree) -> Tree:
    """Fill in the missing keys of `DERIVED_DEFAULTS` in a copy of ``tree``, and in ``references`` itself."""
    filled = merge({}, tree)
    has_variant = value_of(filled, "loss_fn.variant") is not None
    for key, source in DERIVED_DEFAULTS.items():
        # NeMo-RL's own loss has no such keys.
        if key.startswith("loss_fn.") and not has_variant:
            continue
        value = value_of(filled, source)
        if value is None or not is_missing(filled, key):
            continue
        set_value(filled, key, value)
        # If the source is a secret from the environment, the derived key stays a reference to it, too.
        reference = value_of(references, source)
        if reference is not None:
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
    key = ".".join(map(str, error["loc"]))
    kind = error["type"]
    context = error.get("ctx", {})
    cause = context.get("error")
    if isinstance(cause, UserError):
        return str(cause)
    if kind == "missing":
        return f"{key} is missing; add it to the recipe"
    if kind == "extra_forbidden":
        return unknown_key_message(key, error["input"])
    # Pydantic marks the place of an error in a mapping's key, not in its value, by this ending.
    if key.endswith(".[key]"):
        return f"{key.removesuffix('.[key]')}: the name must be {_EXPECTED[kind].format(**context)}"
    if kind in _EXPECTED:
        is_type = kind.endswith(("_type", "_from_float"))
        actual = f" is {kind_named(error['input'])}; it" if is_type else ""
        return f"{key}={shown(error['input'])}{actual} must be {_EXPECTED[kind].format(**context)}"
    message = error["msg"].removeprefix("Value error, ")
    # The message of a section's own validator begins with the key in the section.
    if isinstance(error["input"], Mapping):
        return f"{key}.{message}"
    return f"{key}={shown(error['input'])}: {message}"
