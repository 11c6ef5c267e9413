"""Every key of NeMo-RL that is read refuses what it cannot be, or says what the value means."""

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from nemo_grpo.recipe import load_recipe_dict, refuse_unsupported
from nemo_grpo.recipe.interpolation import resolve
from nemo_grpo.recipe.keys import is_known
from nemo_grpo.recipe.loader import load_tree, merge
from nemo_grpo.recipe.megatron_sections import Section
from nemo_grpo.recipe.recipe import Recipe
from nemo_grpo.recipe.registry import Scope
from nemo_grpo.recipe.rows import Limit
from nemo_grpo.recipe.schema import entries, nemo_rl_keys, unread_keys
from nemo_grpo.recipe.tables import rows
from nemo_grpo.support.dotted import parents, set_value
from nemo_grpo.support.errors import UserError

ROOT = Path(__file__).parents[2]
ENGINES = {"embedded": "quickstart", "cluster": "cluster-quickstart"}
OURS = ("loss_fn", "nemo_grpo")
"""Sections that the tests of variants, tasks and `nemo_grpo.recipe.own` cover."""

VALUES: dict[str, Any] = {
    "text": "nonsense", "zero": 0, "negative": -1, "null": None, "list": ["non"], "mapping": {"non": "sense"},
}  # fmt: skip


BY_TEXT = {
    "nemo_grpo/experiments/jobs.py",  # the keys that a sweep varies
    "nemo_grpo/recipe/cluster_rules.py",  # the keys by which data sets name their environments
    "nemo_grpo/recipe/rows.py",  # the keys of the tables
    "nemo_grpo/rehearsal/overrides.py",  # those that a rehearsal replaces
    "nemo_grpo/support/model_card.py",  # those that a card shows, of a recipe of either engine
}
"""Modules that read a recipe's keys by name."""


def sections_of(field: FieldInfo) -> list[type[Section]]:
    types = [t for t in (field.annotation, *get_args(field.annotation)) if isinstance(t, type)]
    return [t for t in types if issubclass(t, Section)]


def declared(model: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key of NeMo-RL's sections that has a type, those of whole sections too."""
    for name, field in model.model_fields.items():
        if prefix or name not in OURS:
            yield f"{prefix}{name}", field
            for section in sections_of(field):
                yield from declared(section, f"{prefix}{name}.")


KEYS = dict(declared())


def attribute_docstrings(model: type[BaseModel]) -> dict[str, str]:
    """The texts below the fields of a section and its bases."""
    texts = {}
    for base in reversed(model.__mro__):
        if not base.__module__.startswith("nemo_grpo"):
            continue
        (definition,) = ast.parse(inspect.getsource(base)).body
        for field, text in pairwise(definition.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                texts[field.target.id] = inspect.cleandoc(text.value.value)
    return texts


def documented(model: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[tuple[str, str]]:
    """The text below every key's field; a key without one is documented by nothing."""
    texts = attribute_docstrings(model)
    for name, field in model.model_fields.items():
        if prefix or name not in OURS:
            yield f"{prefix}{name}", texts.get(name, "")
            for section in sections_of(field):
                yield from documented(section, f"{prefix}{name}.")


TEXTS = dict(documented())


@cache
def settings_of(engine: str) -> dict[str, Any]:
    """Without references, which take most of the time of loading a recipe."""
    return resolve(load_tree(ROOT / "recipes" / f"{ENGINES[engine]}.yaml")).tree


def refusal(engine: str, key: str, value: Any) -> str | None:
    """Why the engine's recipe is refused with this value."""
    tree = merge({}, settings_of(engine))
    set_value(tree, key, value)
    try:
        recipe = load_recipe_dict(tree)
        if engine == "embedded":
            refuse_unsupported(recipe)
    except UserError as error:
        return str(error)
    return None


def meaning(key: str, kind: str) -> str | None:
    """What the documentation says about a value that is accepted."""
    field = KEYS[key]
    text = TEXTS[key]
    if kind in ("zero", "negative", "null"):
        spelled = {"zero": "0", "negative": "-1", "null": "null"}[kind]
        said = re.search(rf"(?<![\w.-]){spelled}\b[^;]*: ", text)
        return text if said else ORDINARY.get((key, kind))
    if kind == "mapping" and sections_of(field):
        return "a section; `keys` has checked the names in it"
    return ORDINARY.get((key, kind))


NAMES = {
    "checkpointing.checkpoint_dir": "a folder",
    "grpo.adv_estimator.name": "NeMo-RL's formula; one that a variant replaces is refused",
    "logger.log_dir": "a folder",
    "policy.generation.vllm_kwargs.speculative_config.method": "vLLM's name",
    "policy.model_name": "a folder or a name on the Hub",
    "policy.tokenizer.chat_template": "Jinja text",
    "policy.tokenizer.name": "a folder or a name on the Hub",
}
"""Keys whose value is any text."""
LISTS = {
    "policy.generation.stop_strings": "texts",
    "policy.generation.vllm_cfg.quantization_ignored_layer_kws": "parts of a model's names",
    "policy.megatron_cfg.peft.exclude_modules": "a model's names",
    "policy.megatron_cfg.peft.target_modules": "a model's names",
}
MAPPINGS = {
    "env.nemo_gym": "NeMo-Gym's",
    "data.default": "a data set's settings, which NeMo-RL's loaders define",
    "data.train": "a data set's settings, which NeMo-RL's loaders define",
    "data.validation": "a data set's settings, which NeMo-RL's loaders define",
    "logger.mlflow": "arguments of MLflow",
    "logger.wandb": "arguments of wandb.init",
    "policy.hf_config_overrides": "fields of a model's configuration",
    "policy.megatron_cfg.env_vars": "names and values",
    "policy.tokenizer.chat_template_kwargs": "arguments of a template",
}
ORDINARY: dict[tuple[str, str], str] = {
    ("grpo.seed", "zero"): "a seed like any other",
    ("grpo.stop_at_validation_threshold", "zero"): "a value of the metric",
    **{(key, "text"): why for key, why in NAMES.items()},
    **{(key, "list"): why for key, why in LISTS.items()},
    **{(key, "mapping"): why for key, why in MAPPINGS.items()},
}
"""Values that need no explanation in a docstring."""


def test_keys_are_those_that_are_read() -> None:
    """A key that only rows of the tables read has NeMo-RL's type."""
    limited = {row.key for row in rows(Scope.EMBEDDED) if isinstance(row, Limit)}
    assert limited - set(KEYS) - set(entries()) == {"nemo_grpo.engine.generator"}
    assert len(KEYS) > 150
    calls = [
        (path.relative_to(ROOT).as_posix(), ast.unparse(node.args[0]))
        for path in sorted((ROOT / "nemo_grpo").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "value_of"
    ]
    assert {path for path, what in calls if re.fullmatch(r"(\w+\.)?recipe(\.\w+)*", what)} == BY_TEXT
    assert [call for call in calls if call[0].startswith("nemo_grpo/plan/")] == [], "nor by a section's name"


def test_keys_that_nemo_rl_does_not_know_or_read_have_no_type() -> None:
    assert {"grpo.use_best_at_k", "policy.megatron_cfg.do_not_average_loss"} <= unread_keys() < nemo_rl_keys()
    assert unread_keys().isdisjoint(KEYS)
    assert [key for key in KEYS if not is_known(key)] == []


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("key", KEYS)
def test_value_that_a_key_cannot_have_is_refused_by_name_or_has_a_meaning(key: str, kind: str) -> None:
    for engine in ENGINES:
        message = refusal(engine, key, VALUES[kind])
        if message is not None:
            assert key in message or any(f"{section}=" in message for section in parents(key)), message
        else:
            assert meaning(key, kind), f"{engine}: {key}={VALUES[kind]!r} is accepted, and nothing says why"
