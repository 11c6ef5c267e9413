"""Model card: the README.md of an exported Hugging Face folder."""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from nemo_grpo.support import shipped
from nemo_grpo.support.dotted import value_of
from nemo_grpo.support.errors import UNREADABLE, UserError
from nemo_grpo.support.model_folder import is_hub_name, read_config

CARD = "README.md"
_INFO = "training_info.json"
"""File of either engine in the folder of a checkpoint's step, with the step and its metrics."""
TAG = "nemo_grpo"
"""Tag of the cards that this project writes. Their ``base_model`` is the model that training began with."""
_ABOVE = 3
"""Number of enclosing folders to search for the step's folder, and from there for the run's folder."""
_TEMPLATE = """---
{{ card_data }}
---

# {{ title }}

| | |
|---|---|
{% for label, value in rows.items() if value is not none %}| {{ label }} | {{ value }} |
{% endfor %}"""


@dataclass(frozen=True)
class Training:
    """Facts about a training.

    Attributes:
        recipe: Resolved recipe, nested.
        step: Number of the exported step.
        metrics: Validation metrics of that step, by name.
        versions: Versions of packages, by name.
    """

    recipe: Mapping[str, Any] = field(default_factory=dict)
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    def value(self, kind: type, key: str) -> Any:
        """Return a value of the recipe; None if it is missing or of another type."""
        recorded = value_of(self.recipe, key)
        # Control characters would break the card's table and its YAML head.
        return recorded if isinstance(recorded, kind) and str(recorded).isprintable() else None


def training_of(checkpoint: Path) -> Training:
    """Read the facts about a training from the folders that enclose its torch_dist checkpoint."""
    folders_above = checkpoint.absolute().parents[:_ABOVE]
    step_folder = next((folder for folder in folders_above if (folder / _INFO).is_file()), None)
    if step_folder is None:
        return Training()
    run_folders = step_folder.parents[:_ABOVE]
    info = _first_readable([step_folder / _INFO])
    # NeMo-RL writes total_steps and its metrics at the top level; the embedded engine nests them.
    step = info.get("step", info.get("total_steps"))
    metrics = info.get("metrics", info)
    if not isinstance(metrics, dict):
        metrics = {}
    recipes = [step_folder / "config.yaml"]
    recipes += [folder / "recipe.resolved.yaml" for folder in run_folders]
    return Training(
        recipe=_first_readable(recipes),
        # `isinstance` would accept true, which is an int.
        step=step if type(step) is int else None,
        metrics={
            name: value
            for name, value in metrics.items()
            if name.startswith("val") and isinstance(value, float)
        },
        versions=_first_readable(folder / "versions.json" for folder in run_folders),
    )


def _first_readable(paths: Iterable[Path]) -> dict[str, Any]:
    """Read the files in order, and return the first one that is a mapping.

    Without one the result is {} instead of an error: an export must not fail for its card.
    """
    for path in paths:
        with suppress(*UNREADABLE, yaml.YAMLError):
            content = _read(path)
            if isinstance(content, dict):
                return content
    return {}


def _read(path: Path) -> Any:
    """Read the head of a card, a JSON file or a YAML file."""
    if path.name == CARD:
        # Imported late, here and below: the import takes longer than most commands.
        from huggingface_hub import metadata_load

        return metadata_load(path)
    text = path.read_text("utf-8")
    return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)


def base_model(training: Training, folder: Path) -> tuple[str, dict[str, Any]]:
    """Find the model that a training began with, without the network.

    Args:
        training: Facts about the training.
        folder: Source of the export's config.json. It counts as the base model if the recipe names none.
    Returns: the model's name on the Hub, or the name of its folder if that is not known; and the card's
        fields for the base model and its license, as far as they are known.
    """
    recipe_name = _model_name(training)
    base_folder = Path(recipe_name) if recipe_name and Path(recipe_name).is_dir() else folder
    head = _first_readable([base_folder / CARD])
    if recipe_name and is_hub_name(recipe_name):
        hub_name: str | None = recipe_name
    else:
        hub_name = _hub_name_of(base_folder, head)
    # The card from the Hub comes before the card in the folder, which this project may have written.
    head = _cached_head(hub_name) or head
    license_fields = {key: head.get(key) for key in ("license", "license_name", "license_link")}
    facts = license_fields | {"base_model": hub_name}
    if hub_name:
        name = hub_name
    else:
        name = Path(recipe_name).name if recipe_name else base_folder.resolve().name
    return name, {key: text for key, text in facts.items() if isinstance(text, str) and text.isprintable()}


def _cached_head(hub_name: str | None) -> dict[str, Any]:
    """Read the head of a model's card from the Hub's cache on this machine; {} if it is not there."""
    from huggingface_hub import try_to_load_from_cache

    # huggingface_hub raises a ValueError for a name that the Hub does not allow, also for "".
    with suppress(ValueError):
        cached = try_to_load_from_cache(hub_name or "", CARD)
        # The result is a special object, not a path, if the Hub is known to lack the file.
        if isinstance(cached, str):
            return _first_readable([Path(cached)])
    return {}


def _model_name(training: Training) -> str | None:
    """Return the recipe's policy.model_name, or None if this machine cannot resolve its interpolation."""
    name: str | None = training.value(str, "policy.model_name")
    if name is None or "${" not in name:
        return name
    # A run records interpolations unresolved if their value depends on the machine.
    with suppress(UserError):
        model = shipped.referenced_model(name)
        return None if model is None else str(model)
    return None


def _hub_name_of(folder: Path, head: Mapping[str, Any]) -> str | None:
    """Find the name on the Hub of the model in a folder.

    If this project trained the model, it is the name of the base model that its card states.

    Args:
        folder: Model folder.
        head: YAML head of the model's card.
    """
    tags = head.get("tags")
    parent = folder.resolve().parent
    name: object = None
    # Folders of the Hub's cache are models--ORGANISATION--MODEL/snapshots/REVISION.
    if parent.name == "snapshots":
        name = parent.parent.name.removeprefix("models--").replace("--", "/")
    elif isinstance(tags, list) and TAG in tags and head.get("base_model") is not None:
        name = head["base_model"]
    elif (folder / "config.json").is_file():
        name = read_config(folder / "config.json").get("_name_or_path")
    return name if isinstance(name, str) and is_hub_name(name) else None


def _is_metric(name: str, metric_name: str) -> bool:
    """True if two names, in the spelling of either engine, mean the same metric."""
    bare = metric_name.removeprefix("val:")
    return bool(bare) and name in (metric_name, f"val:{bare}", f"validation/{bare}")


def write_card(folder: Path, training: Training, source: Path, *, is_adapter: bool = False) -> None:
    """Write the card of a model or of a LoRA adapter into the exported folder.

    Args:
        folder: Exported folder.
        training: Facts about the training.
        source: Folder of the model that training began with, see `base_model`.
        is_adapter: True if the folder has only the matrices of LoRA.
    """
    from huggingface_hub import ModelCard, ModelCardData

    base_name, base_facts = base_model(training, source)
    variant = training.value(str, "loss_fn.variant")
    tags = ["reinforcement-learning", TAG]
    if variant:
        tags.append(variant)
    has_images = (folder / "preprocessor_config.json").exists()
    data = ModelCardData(
        **base_facts,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="image-text-to-text" if has_images else "text-generation",
        tags=tags,
    )
    rows = _rows(training, base_name, base_facts)
    card = ModelCard.from_template(data, template_str=_TEMPLATE, title=rows["recipe"] or base_name, rows=rows)
    card.save(folder / CARD)


def _rows(training: Training, base_name: str, base_facts: Mapping[str, Any]) -> dict[str, Any]:
    """Build the rows of a card's table, by label. The template leaves out rows whose value is None."""
    has_model_name = bool(training.value(str, "policy.model_name"))
    has_new_model = bool(training.value(dict, "nemo_grpo.new_model"))
    is_new_model = has_new_model and not has_model_name
    license = base_facts.get("license_name") or base_facts.get("license")
    if not license:
        license = "the base model's, which was not known here"
    data_files = training.value(list, "nemo_grpo.task.train_files") or ()
    file_names = ", ".join(Path(file).name for file in data_files if isinstance(file, str))
    # The metric that ranked the checkpoints comes first.
    ranking = training.value(str, "checkpointing.metric_name") or ""
    metrics = sorted(training.metrics.items(), key=lambda item: not _is_metric(item[0], ranking))
    return {
        "base model": "made for the run" if is_new_model else base_name,
        "license": None if is_new_model else license,
        "recipe": training.value(str, "nemo_grpo.run_name"),
        "variant": training.value(str, "loss_fn.variant"),
        "task": training.value(str, "nemo_grpo.task.name"),
        "data": file_names or None,
        "step": training.step,
        **{name: f"{value:.6g}" for name, value in metrics},
        **training.versions,
    }
