"""The runs of an experiment, one per setting and seed; all recipes are validated before any run starts."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_grpo.dotted import value_of
from nemo_grpo.errors import UserError, did_you_mean
from nemo_grpo.extensions import is_reference
from nemo_grpo.recipe import Recipe, load_recipe
from nemo_grpo.recipe.loader import load_tree
from nemo_grpo.shipped import recipe_file
from nemo_grpo.variants import VARIANTS

RUNS = "runs"
"""Folder of the runs within an experiment's folder."""
OWN_KEYS = {
    "grpo.seed": "name the seeds in --seeds, or in sweep.seeds",
    "nemo_grpo.runs_dir": "set --out instead",
    "nemo_grpo.run_name": "a run is named after its setting and seed",
}
"""Keys that every job sets itself -> the remedy."""

START = ("policy.model_name", "nemo_grpo.warm_start", "nemo_grpo.task", "nemo_grpo.prompt")
"""What the runs of a comparison share, besides `VALIDATION`."""
VALIDATION = (
    "grpo.max_val_samples",
    "grpo.val_num_generations_per_prompt",
    "policy.generation.max_new_tokens",
    "policy.generation.stop_token_ids",
    "policy.generation.val_temperature",
    "policy.generation.val_top_k",
    "policy.generation.val_top_p",
)
"""How accuracy is measured: the same in all runs, unless a sweep varies it."""


@dataclass(frozen=True)
class Setting:
    """One line of the table.

    Attributes: label: its name there.  recipe: YAML file.  overrides: on top of it.
                varied: keys among them that a sweep varies.
    """

    label: str
    recipe: Path
    overrides: tuple[str, ...] = ()
    varied: tuple[str, ...] = ()


@dataclass(frozen=True)
class Job:
    """One run: a setting with a seed.

    Attributes: name: of the run's folder.  overrides: all of them, for the command line.  recipe: resolved.
    """

    setting: Setting
    seed: int
    name: str
    overrides: tuple[str, ...]
    recipe: Recipe

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.recipe.run_dir


def compare_settings(recipe: Path, variants: Sequence[str], overrides: Sequence[str] = ()) -> list[Setting]:
    """One setting per variant.

    A variant's recipe is the given one if it is that variant's already; else ``<stem>-<variant>.yaml`` beside
    it, if there is one; else the given one with that variant's defaults for ``loss_fn``.

    Raises: UserError: an unknown or repeated variant, or an override of the variant; the file
            cannot be read.
    """
    if any(override.lstrip("+").startswith("loss_fn.variant=") for override in overrides):
        raise UserError("loss_fn.variant is what --variants varies; name the variants there")
    recipe = recipe_file(recipe)
    base = load_tree(recipe).get("loss_fn", {}).get("variant")
    settings = []
    for variant in variants:
        if not is_reference(variant) and variant not in VARIANTS:
            raise UserError(f"--variants={variant!r} is not a variant{did_you_mean(variant, VARIANTS)}")
        overlay = recipe.with_name(f"{recipe.stem}-{variant.replace('/', '-')}{recipe.suffix}")
        replaced: tuple[str, ...] = ()
        if variant != base and not overlay.is_file():
            replaced = ("~loss_fn", f"loss_fn.variant={variant}")
        path = recipe if variant == base or replaced else overlay
        settings.append(Setting(variant, path, (*replaced, *overrides)))
    if len(set(variants)) < len(variants):
        raise UserError(f"--variants {','.join(variants)}: a variant is given twice; name each once")
    return settings


def make_jobs(
    settings: Sequence[Setting],
    seeds: Sequence[int],
    out: Path,
    *,
    same_start: bool = False,
    prefix: str = "",
) -> list[Job]:
    """The runs, all settings with the first seed first, so that early results already compare.

    Args:    out: the experiment's folder; the runs go to ``out/runs``.
             same_start: refuse settings that do not start from one model on one task. Settings that are
             validated differently are always refused, unless a sweep varies just that.
             prefix: of the runs' names, which are the jobs' on a cluster.
    Raises:  UserError: no seed or setting, a recipe that is not valid (naming the setting), runs that would
             share a folder, different starts or validations, or an override of what every job sets itself
             (`OWN_KEYS`).
    """
    for key, remedy in OWN_KEYS.items():
        if any(key == override_key(override) for setting in settings for override in setting.overrides):
            raise UserError(f"{key} cannot be set for all runs of an experiment; {remedy}")
    if not settings or not seeds:
        raise UserError("nothing to run; name at least one setting and one seed")
    jobs = [_job(setting, seed, out, prefix) for seed in dict.fromkeys(seeds) for setting in settings]
    for what in ("folder", "checkpoints"):
        places = [job.folder if what == "folder" else job.recipe.checkpoint_dir for job in jobs]
        if len(set(places)) < len(places):
            raise UserError(
                f"several runs would share the {what} {max(places, key=places.count)}; give the settings "
                "different labels, and the recipe no checkpointing.checkpoint_dir"
            )
    _check_alike(jobs, [*VALIDATION, *(START if same_start else ())])
    return jobs


def override_key(override: str) -> str:
    """The dotted key of ``key=value``, ``++key=value`` or ``~key``."""
    return override.lstrip("+~").partition("=")[0]


def _job(setting: Setting, seed: int, out: Path, prefix: str) -> Job:
    name = f"{prefix}{re.sub(r'[^A-Za-z0-9_.=+-]+', '-', setting.label)}-s{seed}"
    runs_dir = json.dumps(str(out / RUNS), ensure_ascii=False)  # a folder may be called "runs #1"
    own = (f"grpo.seed={seed}", f"nemo_grpo.runs_dir={runs_dir}", f"nemo_grpo.run_name={name}")
    overrides = (*setting.overrides, *own)
    try:
        recipe = load_recipe(setting.recipe, overrides)
    except UserError as error:
        raise UserError(f"{setting.label}: {error}") from None
    return Job(setting, seed, name, overrides, recipe)


def _check_alike(jobs: Sequence[Job], keys: Sequence[str]) -> None:
    """Require that all jobs have the same values of these keys, except where a sweep varies them."""
    first = jobs[0]
    for job in jobs:
        for key in keys:
            value, expected = value_of(job.recipe, key), value_of(first.recipe, key)
            if value != expected and not key.startswith((*job.setting.varied, *first.setting.varied)):
                rule = "starts from one model on one task; make them equal"
                if key in VALIDATION:
                    rule = f"validates all runs alike; add {key}={expected}, or another value for all"
                raise UserError(
                    f"{key} of {job.setting.label} ({value}) differs from that of {first.setting.label} "
                    f"({expected}): a comparison {rule}"
                )
