"""Whether a recipe's files of problems are on this machine, and hold as many problems as it draws."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from nemo_grpo.data import SOURCES
from nemo_grpo.errors import UserError
from nemo_grpo.recipe import Recipe
from nemo_grpo.recipe.rollout_rules import validation_files_hold_the_validation_problems
from nemo_grpo.tasks import Problem
from nemo_grpo.tasks.jsonl import FileTaskConfig, problems_here


@dataclass(frozen=True)
class DataCheck:
    """What was found.

    Attributes: errors: the run would end with them.  notes: probably not meant.  found: counts, in words;
        empty: the task has no files.
    """

    errors: tuple[str, ...]
    notes: tuple[str, ...]
    found: str


def check_data(recipe: Recipe) -> DataCheck:
    """Look for the files of the recipe's task, and count their problems.

    Every message gives key, value and remedy. Paths are relative to the working directory.
    """
    task, missing = recipe.nemo_grpo.task, missing_files(recipe)
    if missing or not isinstance(task, FileTaskConfig):
        return DataCheck(tuple(remedies(missing)), (), "")
    errors = tuple(validation_files_hold_the_validation_problems(recipe))
    try:
        trained, held_out = (
            problems_here(files, with_images=task.needs_images)
            for files in (task.train_files, task.validation_files)
        )
    except UserError as error:
        return DataCheck(errors or (f"nemo_grpo.task.train_files: {error}",), (), "")
    read = {"train_files": trained, "validation_files": held_out}
    found = ", ".join(f"{len(some)} problems in {key}" for key, some in read.items() if some is not None)
    if trained:
        epochs = recipe.grpo.max_num_steps * recipe.grpo.num_prompts_per_step / len(trained)
        found += f": {epochs:.3g} epochs of training"
    return DataCheck(
        errors, (*_repeated(recipe, trained or []), *_shared(trained or [], held_out or [])), found
    )


def missing_files(recipe: Recipe) -> list[str]:
    """What the recipe's task would read and this machine does not have."""
    task = recipe.nemo_grpo.task
    corpus = getattr(task, "corpus", None)
    listed = (*task.train_files, *task.validation_files) if isinstance(task, FileTaskConfig) else ()
    return [file for file in (*listed, corpus) if file and not Path(file).exists()]


def remedies(missing: Iterable[str]) -> Iterator[str]:
    """One message for the files that a `data prepare` writes, by folder, and one for each other file."""
    folders: dict[str, list[str]] = {}
    for file in map(Path, dict.fromkeys(missing)):
        if file.suffix == ".jsonl" and file.stem in SOURCES:
            folders.setdefault(str(file.parent), []).append(file.stem)
        else:
            yield f"nemo_grpo.task: {file} is missing; write it (docs/tasks.md, Files), or correct the path"
    for folder, names in folders.items():
        yield (
            f"nemo_grpo.task: {len(names)} of its files are missing in {folder}; write them with "
            f"`nemo-grpo data prepare {' '.join(names)} --out {folder}`"
        )


def _shared(trained: list[Problem], held_out: list[Problem]) -> Iterator[str]:
    known = {(problem.question, str(problem.metadata.get("images"))) for problem in trained}
    shared = sum((one.question, str(one.metadata.get("images"))) in known for one in held_out)
    if shared:
        yield (
            f"nemo_grpo.task.validation_files: {shared} of {len(held_out)} questions are among train_files, "
            "so the accuracy also says what was memorised; hold others out"
        )


def _repeated(recipe: Recipe, trained: list[Problem]) -> Iterator[str]:
    prompts, available = recipe.grpo.num_prompts_per_step, len(trained)
    if trained and prompts > available:
        yield (
            f"grpo.num_prompts_per_step={prompts}: nemo_grpo.task.train_files has {available} problems, so a "
            f"step trains on some of them twice; use {available} or fewer"
        )
