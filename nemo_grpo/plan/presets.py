"""The shape of a recipe's model: from its config.json, or from a table of published ones."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from nemo_grpo.models import ModelSpec, read_spec
from nemo_grpo.support.errors import UserError, did_you_mean
from nemo_grpo.support.model_folder import read_config

if TYPE_CHECKING:
    from nemo_grpo.recipe import Recipe


def _published() -> Iterator[ModelSpec]:
    """Read the table `models.yaml`; a name's length goes where its config.json has it."""
    for entry in yaml.safe_load(Path(__file__).with_name("models.yaml").read_text()).values():
        for name, longest in entry["names"].items():
            config = copy.deepcopy(entry["config"])
            config.get("text_config", config)["max_position_embeddings"] = longest
            yield read_spec(config, name)


PRESETS: dict[str, ModelSpec] = {spec.name: spec for spec in _published()}
"""Name on the Hub -> sizes that its config.json gives."""


def shape_of(recipe: Recipe, config_file: Path | None = None, others: Iterable[Recipe] = ()) -> ModelSpec:
    """The shape of a recipe's model: a given config.json, a local folder, the table, or the warm start.

    Args:   others: recipes, one of whose runs may export the model that this one starts from.
    Raises: UserError: none of them knows it.
    """
    name, warm_start = recipe.policy.model_name, recipe.nemo_grpo.warm_start
    if config_file is None and name is None and warm_start is not None:
        config = {"model_type": "qwen2", "tie_word_embeddings": True, **warm_start.model_dump()}
        return read_spec(config, "warm start")
    assert name is not None
    local = config_file or Path(name) / "config.json"
    longest = recipe.policy.hf_config_overrides.get("max_position_embeddings")
    changed: dict[str, Any] = {"max_position_embeddings": longest} if isinstance(longest, int) else {}
    if config_file is not None or local.is_file():
        return replace(read_spec(read_config(local), name), **changed)
    if name not in PRESETS:
        for other in others:
            if other.run_dir != recipe.run_dir and Path(name).is_relative_to(other.run_dir / "hf"):
                return replace(shape_of(other), name=f"{name}, of {other.nemo_grpo.run_name}", **changed)
        is_folder = name.startswith((".", "/")) or name.count("/") != 1
        near = "" if is_folder else did_you_mean(name, PRESETS)
        raise UserError(
            f"policy.model_name={name}: neither a folder with a config.json nor in the planner's table"
            f"{near}; give --model-config FILE"
        )
    return replace(PRESETS[name], **changed)
