"""Model card: the README.md of an exported Hugging Face folder."""

import json
import re
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

CARD, _INFO = "README.md", "training_info.json"
TAG = "nemo_grpo"
"""Tag of the cards that this project writes; their ``base_model`` is the model that training began with."""
_ABOVE = 3
"""Most folders from a checkpoint up to its step's, which has `_INFO`, and from there up to the run's."""
_SHIPPED_MODEL = re.compile(r"\$\{shipped_model:(\w+)\}")
"""A recorded recipe keeps texts that come from this machine unresolved."""
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
    """Facts about a training. Attributes: recipe: resolved.  step.  metrics, versions: by name."""

    recipe: Mapping[str, Any] = field(default_factory=dict)
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    def value(self, kind: type, key: str) -> Any:
        """Return a value of the recipe; None if it is missing or of another type."""
        found = value_of(self.recipe, key)
        return found if isinstance(found, kind) and str(found).isprintable() else None


def training_of(checkpoint: Path) -> Training:
    """Read the facts that a run of either engine has written above its torch_dist checkpoint."""
    above = checkpoint.absolute().parents
    step = next((folder for folder in above[:_ABOVE] if (folder / _INFO).is_file()), None)
    if step is None:
        return Training()
    info, runs = _first([step / _INFO]), step.parents[:_ABOVE]
    number, metrics = info.get("step", info.get("total_steps")), info.get("metrics", info)
    metrics = metrics if isinstance(metrics, dict) else {}
    return Training(
        recipe=_first([step / "config.yaml", *(folder / "recipe.resolved.yaml" for folder in runs)]),
        step=number if type(number) is int else None,
        metrics={k: v for k, v in metrics.items() if k.startswith("val") and isinstance(v, float)},
        versions=_first(folder / "versions.json" for folder in runs),
    )


def _first(paths: Iterable[Path]) -> dict[str, Any]:
    """Return the first mapping that can be read, else {}: a card must not fail an export."""
    from huggingface_hub import metadata_load

    for path in paths:
        with suppress(*UNREADABLE, yaml.YAMLError):
            load = json.loads if path.suffix == ".json" else yaml.safe_load
            found = metadata_load(path) if path.name == CARD else load(path.read_text("utf-8"))
            if isinstance(found, dict):
                return found
    return {}


def base_model(training: Training, folder: Path) -> tuple[str, dict[str, Any]]:
    """Find the model that a training began with, without the network.

    Args:    folder: source of the export's config.json; taken as the base if the recipe names none.
    Returns: its name on the Hub, else its folder's name; ``base_model`` and its license, where known.
    """
    from huggingface_hub import try_to_load_from_cache

    stated = _model_name(training)
    own = Path(stated) if stated and Path(stated).is_dir() else folder
    head, cached = _first([own / CARD]), None
    hub = stated if stated and is_hub_name(stated) else _on_hub(own, head)
    with suppress(ValueError):  # no name that the Hub allows
        cached = try_to_load_from_cache(hub or "", CARD)
    head = _first([Path(cached)] if isinstance(cached, str) else []) or head
    known = {key: head.get(key) for key in ("license", "license_name", "license_link")} | {"base_model": hub}
    name = hub or (Path(stated) if stated else own.resolve()).name
    return name, {key: text for key, text in known.items() if isinstance(text, str) and text.isprintable()}


def _model_name(training: Training) -> str | None:
    """Return the recipe's policy.model_name; None for a text that only another machine can resolve."""
    name: str | None = training.value(str, "policy.model_name")
    if name is None or "${" not in name:
        return name
    shipped_name = _SHIPPED_MODEL.fullmatch(name)
    with suppress(UserError):
        return str(shipped.model(shipped_name[1])) if shipped_name else None
    return None


def _on_hub(folder: Path, head: Mapping[str, Any]) -> str | None:
    """Find the Hub's name of a folder's model, or of the model that this project trained it from."""
    above, tags = folder.resolve().parent, head.get("tags")
    stated = head.get("base_model") if isinstance(tags, list) and TAG in tags else None
    if above.name == "snapshots":
        stated = above.parent.name.removeprefix("models--").replace("--", "/")
    elif stated is None and (folder / "config.json").is_file():
        stated = read_config(folder / "config.json").get("_name_or_path")
    return stated if isinstance(stated, str) and is_hub_name(stated) else None


def _is_metric(name: str, metric_name: str) -> bool:
    """True if a checkpoint's metric, as either engine spells it, is checkpointing.metric_name."""
    bare = metric_name.removeprefix("val:")
    return bool(bare) and name in (metric_name, f"val:{bare}", f"validation/{bare}")


def write_card(folder: Path, training: Training, source: Path, *, is_adapter: bool = False) -> None:
    """Write the card of a model, or of PEFT's matrices, into its folder. Args: source: see `base_model`."""
    from huggingface_hub import ModelCard, ModelCardData

    (name, known), variant = base_model(training, source), training.value(str, "loss_fn.variant")
    made = not training.value(str, "policy.model_name") and training.value(dict, "nemo_grpo.new_model")
    license = (
        known.get("license_name") or known.get("license") or "the base model's, which was not known here"
    )
    has_images = (folder / "preprocessor_config.json").exists()
    data = ModelCardData(
        **known,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="image-text-to-text" if has_images else "text-generation",
        tags=["reinforcement-learning", TAG, *([variant] if variant else [])],
    )
    ranking = training.value(str, "checkpointing.metric_name") or ""
    by_rank = sorted(training.metrics.items(), key=lambda item: not _is_metric(item[0], ranking))
    files = training.value(list, "nemo_grpo.task.train_files") or ()
    rows = {
        "base model": "made for the run" if made else name,
        "license": None if made else license,
        "recipe": training.value(str, "nemo_grpo.run_name"),
        "variant": variant,
        "task": training.value(str, "nemo_grpo.task.name"),
        "data": ", ".join(Path(file).name for file in files if isinstance(file, str)) or None,
        "step": training.step,
        **{name: f"{value:.6g}" for name, value in by_rank},
        **training.versions,
    }
    card = ModelCard.from_template(data, template_str=_TEMPLATE, title=rows["recipe"] or name, rows=rows)
    card.save(folder / CARD)
