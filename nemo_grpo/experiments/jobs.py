"""Runs of an experiment, one per setting and seed; all recipes are validated before any run starts."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nemo_grpo.recipe import Recipe, load_recipe
from nemo_grpo.support.dotted import value_of
from nemo_grpo.support.errors import UserError, how_ended

RUNS = "runs"
"""Folder of the runs within an experiment's folder."""
OWN_KEYS = {
    "grpo.seed": "name the seeds in --seeds, or in sweep.seeds",
    "nemo_grpo.runs_dir": "set --out instead",
    "nemo_grpo.run_name": "a run is named after its setting and seed",
}
"""Keys that every job sets itself -> the remedy."""

START = ("policy.model_name", "nemo_grpo.new_model", "nemo_grpo.task", "nemo_grpo.prompt")
"""Keys of model and task, which must be the same for all runs unless a sweep varies them."""
VALIDATION = (
    "grpo.max_val_samples",
    "grpo.val_num_generations_per_prompt",
    "policy.generation.max_new_tokens",
    "policy.generation.stop_token_ids",
    "policy.generation.val_temperature",
    "policy.generation.val_top_k",
    "policy.generation.val_top_p",
)
"""Keys of the validation, which must be the same for all runs unless a sweep varies them."""


@dataclass(frozen=True)
class Setting:
    """A recipe with overrides that is trained under every seed; one line of the table of results.

    Attributes:
        label: unique name of the setting.
        recipe: file of the recipe.
        overrides: overrides of the recipe, without the seed and the run's name.
        varied: keys that differ between the settings.
    """

    label: str
    recipe: Path
    overrides: tuple[str, ...] = ()
    varied: tuple[str, ...] = ()


@dataclass(frozen=True)
class Job:
    """One run: a setting under one seed, its name, its recipe, and all overrides for the command line."""

    setting: Setting
    seed: int
    name: str
    overrides: tuple[str, ...]
    recipe: Recipe

    @property
    def folder(self) -> Path:
        return self.recipe.run_dir


@dataclass(frozen=True)
class Status:
    """State of a run.

    Attributes:
        state: how the run's last process ended.
        exit_code: exit code of that process.
        error: last error line of a failed run.
    """

    state: Literal["finished", "failed", "interrupted"]
    exit_code: int
    error: str = ""

    def __str__(self) -> str:
        return f"{self.state} ({how_ended(self.exit_code)}) {self.error}".rstrip()


def make_jobs(settings: Sequence[Setting], seeds: Sequence[int], out: Path, *, prefix: str = "") -> list[Job]:
    """Make the runs, ordered by seed, so that the first results already compare all settings.

    Args:
        settings: at least one setting.
        seeds: at least one seed; a repeated one counts once.
        out: folder of the experiment; the runs go to ``out/runs``.
        prefix: beginning of the runs' names, which are also the names of cluster jobs.
    """
    override_keys = {override_key(override) for setting in settings for override in setting.overrides}
    for key, remedy in OWN_KEYS.items():
        if key in override_keys:
            raise UserError(f"{key} cannot be set for all runs of an experiment; {remedy}")
    if not settings or not seeds:
        raise UserError("nothing to run; name at least one setting and one seed")
    jobs = [_job(setting, seed, out, prefix) for seed in dict.fromkeys(seeds) for setting in settings]
    _check_unshared("folder", [job.folder for job in jobs])
    _check_unshared("checkpoints", [job.recipe.checkpoint_dir for job in jobs])
    _check_alike(jobs)
    return jobs


def _check_unshared(kind: str, folders: Sequence[Path]) -> None:
    """Refuse runs that would write into one folder."""
    # Labels that differ only in special characters give equal names.
    if len(set(folders)) < len(folders):
        raise UserError(
            f"several runs would share the {kind} {max(folders, key=folders.count)}; give the settings "
            "different labels, and the recipe no checkpointing.checkpoint_dir"
        )


@contextmanager
def naming(setting: Setting) -> Iterator[None]:
    """Put the setting's label before a `UserError` from the block."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{setting.label}: {error}") from None


def one_per_setting(jobs: Sequence[Job]) -> list[Job]:
    """Return one job of each setting, for checks that do not depend on the seed."""
    return list({job.setting.label: job for job in jobs}.values())


def override_key(override: str) -> str:
    """Return the dotted key of ``key=value``, ``++key=value`` or ``~key``."""
    return override.lstrip("+~").partition("=")[0]


def overlap(key: str, other_key: str) -> bool:
    """Return True if the keys are equal, or one of them is a section that contains the other."""
    return f"{key}.".startswith(f"{other_key}.") or f"{other_key}.".startswith(f"{key}.")


def _job(setting: Setting, seed: int, out: Path, prefix: str) -> Job:
    label = re.sub(r"[^A-Za-z0-9_.=+-]+", "-", setting.label)
    name = f"{prefix}{label}-s{seed}"
    # Quoted, because an override's value is YAML, in which "#" begins a comment: without quotes, "runs #1"
    # would become "runs".
    runs_dir = json.dumps(str(out / RUNS), ensure_ascii=False)
    overrides = (
        *setting.overrides,
        f"grpo.seed={seed}",
        f"nemo_grpo.runs_dir={runs_dir}",
        f"nemo_grpo.run_name={name}",
    )
    with naming(setting):
        recipe = load_recipe(setting.recipe, overrides)
    return Job(setting, seed, name, overrides, recipe)


def _check_alike(jobs: Sequence[Job]) -> None:
    """Require that all jobs share `START` and `VALIDATION`, except for keys that a sweep varies."""
    first = jobs[0]
    for job in jobs:
        for key in (*VALIDATION, *START):
            value = value_of(job.recipe, key)
            expected = value_of(first.recipe, key)
            varied = (*job.setting.varied, *first.setting.varied)
            is_varied = any(overlap(key, varied_key) for varied_key in varied)
            if value == expected or is_varied:
                continue
            rule = "starts from one model on one task; make them equal"
            if key in VALIDATION:
                rule = f"validates all runs alike; add {key}={expected}, or another value for all"
            raise UserError(
                f"{key} of {job.setting.label} ({value}) differs from that of {first.setting.label} "
                f"({expected}): a comparison {rule}"
            )
