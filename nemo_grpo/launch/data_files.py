"""Whether a recipe's files of problems are on this machine, and hold as many problems as it draws."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from nemo_grpo.data import SOURCES
from nemo_grpo.errors import UserError
from nemo_grpo.recipe import Recipe
from nemo_grpo.tasks.jsonl import FileTaskConfig, listed_problems, not_held_out


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
    try:
        _draw(recipe)
        read = {key: listed_problems(task, key) for key in ("train_files", "validation_files")}
    except UserError as error:
        return DataCheck((str(error),), (), "")
    trained, held_out = read.values()
    kept = not_held_out(trained, held_out)
    found = ", ".join(f"{len(some)} problems in {key}" for key, some in read.items() if some)
    if kept:
        epochs = recipe.grpo.max_num_steps * recipe.grpo.num_prompts_per_step / len(kept)
        found += f": {epochs:.3g} epochs of training"
    return DataCheck((), (*_repeated(recipe, len(kept)), *_dropped(len(trained), len(kept))), found)


def _draw(recipe: Recipe) -> None:
    """Ask the task for what a run begins with.

    Raises: UserError: as the run.
    """
    task, grpo = recipe.task.build(), recipe.grpo
    task.train_problem(0, grpo.seed)
    if grpo.validates and grpo.max_val_samples is not None:
        task.validation_problems(grpo.max_val_samples)


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
            yield (
                f"nemo_grpo.task: {file} is missing; correct the path, or write it: of problems, JSON lines "
                "with question and answer"
            )
    for folder, names in folders.items():
        yield (
            f"nemo_grpo.task: {len(names)} of its files are missing in {folder}; write them with "
            f"`nemo-grpo data prepare {' '.join(names)} --out {folder}`"
        )


def _dropped(trained: int, kept: int) -> Iterator[str]:
    if kept < trained:
        yield (
            f"nemo_grpo.task.train_files: {trained - kept} of {trained} problems are in validation_files, "
            f"too; training leaves them out and has {kept}"
        )


def _repeated(recipe: Recipe, available: int) -> Iterator[str]:
    prompts = recipe.grpo.num_prompts_per_step
    if available and prompts > available:
        yield (
            f"grpo.num_prompts_per_step={prompts}: nemo_grpo.task.train_files has {available} problems, so a "
            f"step trains on some of them twice; use {available} or fewer"
        )
