"""The README.md of a Hugging Face folder: what the model is, as people and the Hub read it."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from checkpoints_conv.base_model import CARD, TAG, BaseModel, base_model
from nemo_grpo.errors import UNREADABLE

_INFO = "training_info.json"
"""In every step's folder, three above its torch_dist checkpoint; NeMo-RL puts ``config.yaml`` there, too."""
_ABOVE = 3
"""The run's own folder is at most so far above a step's: checkpoints, or links that wait for their export."""


@dataclass(frozen=True)
class Training:
    """What is known of a training. Attributes: recipe: resolved.  step.  metrics, versions: by name."""

    recipe: Mapping[str, Any] = field(default_factory=dict)
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    def value(self, *path: str) -> Any:
        """A value of the recipe; None if it is not there."""
        found: Any = self.recipe
        for name in path:
            found = found.get(name) if isinstance(found, Mapping) else None
        return found

    def text(self, *path: str) -> str | None:
        """A value that is a text of one line; None if it is not there, or something else."""
        found = self.value(*path)
        return found if isinstance(found, str) and found.isprintable() else None


def training_of(checkpoint: Path) -> Training:
    """What a run has written above a torch_dist checkpoint of its own; nothing else is looked at.

    Args: checkpoint: the folder with ``.metadata``, of either engine.
    """
    above = checkpoint.absolute().parents
    step = next((folder for folder in above[:_ABOVE] if (folder / _INFO).is_file()), None)
    if step is None:
        return Training()
    info, runs = _first([step / _INFO]), step.parents[:_ABOVE]
    metrics = info.get("metrics") or {k: v for k, v in info.items() if k.startswith("val")}
    number = info.get("step", info.get("total_steps"))
    versions = _first(folder / "versions.json" for folder in runs)
    return Training(
        recipe=_first([step / "config.yaml", *(folder / "recipe.resolved.yaml" for folder in runs)]),
        step=number if type(number) is int else None,
        metrics={k: v for k, v in metrics.items() if _is_number(v)} if isinstance(metrics, dict) else {},
        versions={name: version for name, version in versions.items() if isinstance(version, str)},
    )


def _first(paths: Iterable[Path]) -> dict[str, Any]:
    """The first object that can be read; a card is not worth a failed export."""
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
            found = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
        except (*UNREADABLE, yaml.YAMLError):
            continue
        if isinstance(found, dict):
            return found
    return {}


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300 and math.isfinite(value)


def write_card(folder: Path, training: Training, source: Path, *, is_adapter: bool = False) -> None:
    """Write the card of a model into its folder.

    Args: source: the folder whose config.json it has; of the base model, where the recipe does not say.
          is_adapter: the folder holds PEFT's matrices instead of a model.
    """
    from huggingface_hub import ModelCardData

    base = base_model(training.text("policy", "model_name"), source)
    variant = training.text("loss_fn", "variant")
    has_images = (folder / "preprocessor_config.json").exists()
    data = ModelCardData(
        license=base.license.get("license"),
        license_name=base.license.get("license_name"),
        license_link=base.license.get("license_link"),
        base_model=base.name if base.is_on_hub else None,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="image-text-to-text" if has_images else "text-generation",
        tags=["reinforcement-learning", TAG, *([variant] if variant else [])],
    )
    title = training.text("nemo_grpo", "run_name") or Path(base.name).name
    rows = _rows(training, base)
    tables = [("", rows), ("Validation", _numbers(training.metrics)), ("Versions", training.versions)]
    body = "\n".join(_table(heading, of) for heading, of in tables if of)
    text = f"---\n{data.to_yaml()}\n---\n\n# {title}\n\n{body}"
    (folder / CARD).write_text(text, encoding="utf-8")


def _rows(training: Training, base: BaseModel) -> dict[str, str]:
    is_made = training.value("policy", "model_name") is None and training.value("nemo_grpo", "warm_start")
    stated = training.value("nemo_grpo", "task", "train_files")
    files = stated if isinstance(stated, list) else ()
    found = {
        "base model": "made for the run" if is_made else base.name,
        "license": None if is_made else _license(base),
        "recipe": training.text("nemo_grpo", "run_name"),
        "variant": training.text("loss_fn", "variant"),
        "task": training.text("nemo_grpo", "task", "name"),
        "data": ", ".join(Path(file).name for file in files if isinstance(file, str)) or None,
        "step": training.step,
    }
    return {label: str(value) for label, value in found.items() if value is not None}


def _license(base: BaseModel) -> str:
    name = base.license.get("license_name", base.license.get("license"))
    return name or "the base model's, which was not known here"


def _numbers(metrics: Mapping[str, float]) -> dict[str, str]:
    return {name: f"{value:.6g}" for name, value in metrics.items()}


def _table(heading: str, rows: Mapping[str, str]) -> str:
    title = f"## {heading}\n\n" if heading else ""
    lines = "".join(f"| {label} | {value} |\n" for label, value in rows.items())
    return f"{title}| | |\n|---|---|\n{lines}"
