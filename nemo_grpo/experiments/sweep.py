"""Settings of an experiment: a sweep file with a recipe and the keys to vary, or a list of variants.

sweep:
  recipe: ../quickstart-tr_grpo.yaml        # relative to this file
  seeds: 3                                  # 0, 1, 2; or a list
  overrides: {grpo.max_num_steps: 80}       # for every setting; may be left out
  settings:                                 # one table line each
    - {loss_fn.weighting: equal}
    - {loss_fn.lower: 1.0, loss_fn.upper: 1.2}
  grids:                                    # every combination of each grid's values
    - {loss_fn.tau: [0.5, 2.0, 9.0]}
  cluster:                                  # keys that differ with --target cluster; may be left out
    recipe: ../tr_grpo/tr_grpo-qwen2.5-3b-instruct-logic-1n8g.yaml
    seeds: 1
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nemo_grpo.experiments.jobs import Setting, overlap, override_key
from nemo_grpo.recipe.host import keeps_its_data
from nemo_grpo.recipe.loader import load_tree
from nemo_grpo.support import shipped
from nemo_grpo.support.errors import UNREADABLE, UserError, did_you_mean
from nemo_grpo.variants import variant_class
from nemo_grpo.variants.nemo_rl_loss import NeMoRLLoss

FOLDER = Path("recipes") / "sweeps"
SECTION = "sweep"
LABEL = "label"
"""Key of a setting that names it in the tables; it changes nothing in the recipe."""
VARIANT = "loss_fn.variant"
Target = Literal["embedded", "cluster"]


class _OneSweep(BaseModel):
    """Keys of a sweep for one target. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", strict=True)

    recipe: str
    seeds: int | list[int] = 3
    overrides: dict[str, Any] = Field(default_factory=dict)
    settings: list[dict[str, Any]] = Field(default_factory=list)
    grids: list[dict[str, list[Any]]] = Field(default_factory=list)


class _SweepFile(_OneSweep):
    """The section ``sweep``. For the cluster, keys of its part ``cluster`` replace the others."""

    cluster: _OneSweep | None = None

    def of(self, target: Target) -> _OneSweep:
        """Return the settings of a target."""
        if target == "embedded" or self.cluster is None:
            return self
        # Only keys that the file sets: the defaults of the others must not replace the embedded target's.
        written = {key: getattr(self.cluster, key) for key in self.cluster.model_fields_set}
        return self.model_copy(update=written)


class Sweep(NamedTuple):
    """A sweep file, read for one target.

    Attributes:
        name: the file's stem.
        settings: settings to train, one for each line of the table.
        seeds: seeds of every setting.
    """

    name: str
    settings: list[Setting]
    seeds: list[int]


def is_sweep(path: Path) -> bool:
    """Return True for a YAML file whose only section is ``sweep``."""
    try:
        text = path.read_text()
        # Most YAML files are recipes. Without the word they need not be parsed, which takes longer.
        tree = yaml.safe_load(text) if SECTION in text else None
    except (*UNREADABLE, yaml.YAMLError):
        # Not a sweep, so that the recipe loader reads the file and reports the error.
        return False
    return isinstance(tree, dict) and list(tree) == [SECTION]


def find_sweep(name: str) -> Path:
    """Find the file for ``name``: a path, or a preset's name in recipes/sweeps."""
    folders = (FOLDER, shipped.folder("recipes") / "sweeps")
    candidates = [Path(name)] + [folder / f"{name}.yaml" for folder in folders]
    for path in candidates:
        if path.is_file():
            return path
    presets = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
    raise UserError(f"{name} is neither a file nor a preset{did_you_mean(name, presets)}")


def targets(path: Path) -> list[Target]:
    """List the targets for which a sweep file has settings."""
    return ["embedded"] if _read(path).cluster is None else ["embedded", "cluster"]


def load_sweep(path: Path, target: Target = "embedded") -> Sweep:
    """Read a sweep file for a target; `make_jobs` loads the settings' recipes."""
    file = _read(path).of(target)
    common = tuple(_override(key, value) for key, value in file.overrides.items())
    points = list(file.settings)
    for grid in file.grids:
        for values in itertools.product(*grid.values()):
            points.append(dict(zip(grid, values, strict=True)))
    if not points:
        raise UserError(f"{path}: nothing is varied; set sweep.settings or sweep.grids")
    recipe = shipped.beside(path, file.recipe)
    seeds = list(range(file.seeds)) if isinstance(file.seeds, int) else file.seeds
    return Sweep(path.stem, _settings(str(path), points, recipe, common), seeds)


def sweep_variants(recipe: Path, variants: Sequence[str], seeds: Sequence[int]) -> Sweep:
    """Make a sweep that varies only ``loss_fn.variant``. Each setting is named after its variant."""
    points = [{LABEL: variant, VARIANT: variant} for variant in variants]
    settings = _settings(f"--variants {','.join(variants)}", points, shipped.recipe_file(recipe), ())
    return Sweep(recipe.stem, settings, list(seeds))


def _settings(
    source: str, points: Sequence[Mapping[str, Any]], recipe: Path, common: tuple[str, ...]
) -> list[Setting]:
    """Make the settings of a sweep. A default label lists the varied keys: ``lower=1.0 upper=1.2``."""
    settings: dict[str, Setting] = {}
    for point in points:
        varied = {key: value for key, value in point.items() if key != LABEL}
        words = [f"{key.rpartition('.')[2]}={value}" for key, value in varied.items()]
        label = str(point.get(LABEL, " ".join(words)))
        if label in settings:
            raise UserError(f"{source}: the setting {label!r} is repeated; name it once")
        variant_recipe, variant_overrides = _recipe_of(varied.get(VARIANT), recipe)
        changes = [_override(key, value) for key, value in varied.items() if key != VARIANT]
        # The order matters: of two overrides of one key the last one holds, which must be the varied one.
        overrides = (*variant_overrides, *common, *changes)
        settings[label] = Setting(label, variant_recipe, overrides, tuple(varied))
    return list(settings.values())


def _read(path: Path) -> _SweepFile:
    if not is_sweep(path):
        raise UserError(f"{path} is not a sweep: it must be a YAML file with the single section {SECTION}")
    try:
        return _SweepFile.model_validate(yaml.safe_load(path.read_text())[SECTION])
    except ValidationError as error:
        detail = error.errors()[0]
        key = ".".join([SECTION, *map(str, detail["loc"])])
        if detail["type"] == "extra_forbidden":
            near = did_you_mean(key.rpartition(".")[2], _SweepFile.model_fields)
            raise UserError(f"{path}: {key} is not a key of a sweep{near}") from None
        raise UserError(f"{path}: {key}: {detail['msg']}") from None


def _recipe_of(variant: str | None, recipe: Path) -> tuple[Path, tuple[str, ...]]:
    """Choose the recipe that trains a variant, and the overrides that select the variant in it.

    1. ``recipe`` itself without overrides, if it already has the variant.
    2. ``<stem>-<variant>.yaml`` beside it, if there is such a file.
    3. ``recipe`` with its variant replaced. Parameters of the loss that the new variant also has keep the
       recipe's values, so that a KL penalty, for example, holds for all variants of a comparison.
    """
    if variant is None:
        return recipe, ()
    tree = load_tree(recipe)
    loss = tree.get("loss_fn") or {}
    if not isinstance(loss, dict) or variant == loss.get("variant"):
        return recipe, ()
    overlay = recipe.with_name(f"{recipe.stem}-{variant.replace('/', '-')}{recipe.suffix}")
    if overlay.is_file():
        return overlay, ()
    try:
        parameters = set(variant_class(variant, VARIANT).model_fields)
    except UserError:
        # An unknown variant is passed on. `make_jobs` refuses it with the name of the setting.
        return recipe, (f"{VARIANT}={variant}",)
    # A recipe of NeMo-RL itself uses NeMo-RL's names for keys of the loss; `recipe.host` converts them.
    if keeps_its_data(tree):
        parameters |= NeMoRLLoss.keys().keys()
    # Parameters that the variant does not have would be unknown keys, and must be removed.
    removals = [f"~loss_fn.{key}" for key in loss if key not in parameters]
    return recipe, (*removals, f"{VARIANT}={variant}")


def _override(key: str, value: Any) -> str:
    """Write a key and its value as on a command line, where the value is YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000)
    # PyYAML ends a scalar with the line "...".
    text = text.removesuffix("...\n").strip()
    return f"{key}={text}"


def with_overrides(settings: list[Setting], overrides: Sequence[str]) -> list[Setting]:
    """Add overrides to all settings.

    Raises:
        UserError: an override sets a key that the settings vary.
    """
    varied = sorted({key for setting in settings for key in setting.varied})
    for override in overrides:
        for key in varied:
            if overlap(key, override_key(override)):
                raise UserError(f"{override}: {key} is what the settings vary; leave the override out")
    return [replace(setting, overrides=(*setting.overrides, *overrides)) for setting in settings]
