"""Loads and validates recipes; errors are in the recipe's own terms."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

# Imported because they register their rules, in the order of their messages.
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
"""Missing key -> the key whose value it takes, in this order."""
MAPPING = "a mapping"
"""Origin, in `Written.origins`, of a key that no file gave."""
FOLLOW_VAL_PERIOD = ("val_at_start", "val_at_end")
"""Keys of ``grpo`` whose null means true if grpo.val_period is above 0."""

DECLARED = frozenset(key for key, _ in model_keys(Recipe)).union(("loss_fn", "nemo_grpo"))
"""Keys that our models type; NeMo-RL's schema types the others."""


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Read, merge, resolve and validate a recipe.

    Args:
        path: YAML file, or the name of a shipped recipe.
        overrides: ``key=value``, ``++key=value`` or ``~key``, applied before interpolation, so that dependent
            values follow.
    Raises: UserError: all errors that can be found at once.
    """
    return _load(read(path, overrides))


def load_recipe_dict(tree: Mapping[str, Any], overrides: Iterable[str] = ()) -> Recipe:
    """Validate a nested mapping without ``defaults`` like `load_recipe`."""
    origins = {key: MAPPING for key, _ in leaves(tree)}
    written = Written(dict(tree), origins, order=(MAPPING,))
    return _load(written.with_overrides(overrides))


def _load(written: Written) -> Recipe:
    """Resolve and validate settings."""
    host.refuse_other_algorithms(written.tree)
    tree, references = _resolved(written)
    # Before `adapted`: `recipe resolve` shows an invalid recipe with the keys that its writer used.
    shown_with_errors = Resolved(_with_derived_defaults(tree, references), references)
    dotted_errors = dotted_key_errors(tree)
    if dotted_errors:
        raise RecipeErrors(dotted_errors, shown_with_errors)

    settings, notes = host.adapted(tree, written.is_stock)
    _follow_val_period(settings)
    # All errors of names and types at once; the rules need a recipe whose types are right.
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
        # The users of NeMo-RL's own recipes may have chosen such a setting; ours have a task.
        if recipe.nemo_grpo.task is None:
            notes += messages(Scope.CARE, recipe)
        else:
            errors += messages(Scope.CARE, recipe)
    if errors:
        raise RecipeErrors(errors, shown_with_errors)
    recipe.keep_origin(written, settings, references, notes)
    return recipe


def _resolved(written: Written) -> Resolved:
    """Resolve the interpolations; an error comes with those of unknown keys."""
    try:
        return resolve(written.tree)
    except UserError as error:
        # A misspelt key often is the reason: policy.model_name_or_path leaves model_name at the base's ???.
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
    """Return a message for each wrong value, but none for its copies through `DERIVED_DEFAULTS`."""
    messages = [_explain(detail) for detail in error.errors()]
    derived_keys = tuple(f"{key}=" for key in DERIVED_DEFAULTS if value_of(settings, key) is None)
    about_written_values = [message for message in messages if not message.startswith(derived_keys)]
    # All of them where the source itself has passed: the derived key has a stricter range.
    return about_written_values or messages


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
    errors = messages(scope, recipe)
    if errors:
        raise RecipeErrors(errors)


class RecipeErrors(UserError):
    """All errors of a recipe.

    Attributes:
        errors: One message each.
        settings: Values as far as they were resolved.
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
    """Fill in missing keys by `DERIVED_DEFAULTS`, in ``references`` too; the model reports wrong types."""
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
        # A secret from the environment stays a reference in the copy, too.
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
    # Pydantic's place of a key of a mapping, as opposed to its value.
    if key.endswith(".[key]"):
        return f"{key.removesuffix('.[key]')}: the name must be {_EXPECTED[kind].format(**context)}"
    if kind in _EXPECTED:
        is_type = kind.endswith(("_type", "_from_float"))
        actual = f" is {kind_named(error['input'])}; it" if is_type else ""
        return f"{key}={shown(error['input'])}{actual} must be {_EXPECTED[kind].format(**context)}"
    message = error["msg"].removeprefix("Value error, ")
    # A section's own rule: its message begins with the key in the section.
    if isinstance(error["input"], Mapping):
        return f"{key}.{message}"
    return f"{key}={shown(error['input'])}: {message}"
