"""What ``--benchmarks`` names: prepared data sets or JSONL files, with task and problems."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_grpo.data.manifest import read_manifest, sha256
from nemo_grpo.data.sources import find_source
from nemo_grpo.errors import UserError, did_you_mean
from nemo_grpo.tasks import PROMPTS, TASKS, Problem, Prompt, PromptLike, Task, TaskConfig
from nemo_grpo.tasks.jsonl import FileTaskConfig, read_problems
from nemo_grpo.tasks.prompts import IMAGES

log = logging.getLogger(__name__)

DEFAULT_PROMPTS = {"math": "gpg_7b", "logic": "tr_grpo_logic"}
"""Task -> preset that is used where none is asked for."""
TASK_OPTIONS: dict[str, dict[str, Any]] = {
    "cw_grpo": {"form": "think"},
    "gpg": {"form": "think_answer"},
    "gpg_7b": {"form": "boxed"},
    "tr_grpo_math": {"form": "boxed"},
    "tr_grpo_logic": {"think_is_open": True},
}
"""Preset -> the task's parameters that go with it: which form the prompt asks for."""


@dataclass(frozen=True)
class Benchmark:
    """Problems from one file, their task, and how they are asked.

    Attributes: prompt_name: the preset, or ``recipe``.  by_recipe: a recipe's prompt or task parameters are
                used.
    """

    name: str
    path: Path
    digest: str
    task: Task
    problems: list[Problem]
    prompt: PromptLike
    prompt_name: str
    by_recipe: bool = False

    def identity(self) -> dict[str, Any]:
        """What makes results of this name those of another benchmark if it changes; JSON values."""
        return {"sha256": self.digest, "prompt": self.prompt_name, "recipe": self._of_recipe()}

    def _of_recipe(self) -> dict[str, Any] | None:
        """What a preset's name does not say."""
        if not self.by_recipe:
            return None
        names = ("system", "template", "use_chat_template", "response_prefix")
        files = {"train_files", "validation_files"}
        return {
            "prompt": {name: getattr(self.prompt, name) for name in names},
            "task": self.task.config.model_dump(mode="json", exclude=files),
        }


@dataclass(frozen=True)
class Choice:
    """How benchmarks shall be asked where their files do not say.

    Attributes:
        data_dir: of prepared sets.  limit: first so many problems; None: all.
        task: name for files without a manifest; None: math.
        preset: prompt by name; None: the recipe's, or the task's usual one.
        recipe_task, recipe_prompt: of a recipe, if one was given: its parameters hold for the same task.
    """

    data_dir: Path
    limit: int | None = None
    task: str | None = None
    preset: str | None = None
    recipe_task: TaskConfig | None = None
    recipe_prompt: PromptLike | None = None


def load_benchmark(item: str, choice: Choice) -> Benchmark:
    """A data set by name, or a JSONL file.

    Raises: UserError: unknown name, a set that is not prepared, a file that cannot be read, or a task that
            has images.
    """
    path = Path(item)
    if path.suffix != ".jsonl":
        path = choice.data_dir / f"{find_source(item).name}.jsonl"
        if not path.is_file():
            raise UserError(
                f"--benchmarks {item}: {path} is missing; run `nemo-grpo data prepare {path.stem} --out "
                f"{choice.data_dir}`, or give the path of a JSONL file"
            )
    config, prompt, prompt_name, by_recipe = _asked(path, choice)
    task = config.build()
    if config.needs_images:
        raise UserError(f"--benchmarks {item}: task {config.name} has images; {IMAGES}")
    available = len(read_problems([path]))
    if not available:
        raise UserError(f"--benchmarks {item}: {path} holds no problems")
    problems = task.validation_problems(min(available, choice.limit or available))
    return Benchmark(path.stem, path, _digest(path), task, problems, prompt, prompt_name, by_recipe)


def _asked(path: Path, choice: Choice) -> tuple[FileTaskConfig, PromptLike, str, bool]:
    """Task configuration, prompt, the prompt's name, and whether a recipe says any of it."""
    manifest = read_manifest(path) or {}
    name = choice.task or str(manifest.get("task", "math"))
    recipe_task = choice.recipe_task if choice.recipe_task and choice.recipe_task.name == name else None
    preset = choice.preset
    if preset is None and choice.recipe_prompt is None:
        preset = DEFAULT_PROMPTS.get(name)
    options: Mapping[str, Any] = {}
    if preset is not None:
        prompt: PromptLike = _preset(preset)
        options = TASK_OPTIONS.get(preset, {})
    else:
        prompt = choice.recipe_prompt or Prompt()
    kind = _file_task(name)
    known = {key: value for key, value in options.items() if key in kind.model_fields}
    base = recipe_task.model_dump() if recipe_task is not None else {}
    files = {"validation_files": (str(path),), "train_files": ()}
    return (
        kind(**{**base, **known, **files}),
        prompt,
        preset or ("recipe" if choice.recipe_prompt else "none"),
        recipe_task is not None or prompt is choice.recipe_prompt,
    )


def _preset(name: str) -> Prompt:
    if name not in PROMPTS:
        raise UserError(f"--prompt {name} is unknown{did_you_mean(name, PROMPTS)}")
    return PROMPTS[name]


def _file_task(name: str) -> type[FileTaskConfig]:
    kinds = {name: kind for name, kind in TASKS.items() if issubclass(kind, FileTaskConfig)}
    if name not in kinds:
        raise UserError(f"--task {name} reads no files{did_you_mean(name, kinds)}")
    return kinds[name]


def _digest(path: Path) -> str:
    digest, manifest = sha256(path), read_manifest(path)
    if manifest is not None and manifest.get("sha256") != digest:
        log.warning("%s is not what its manifest describes; see `nemo-grpo data verify`", path)
    return digest


def opens_think(task: Task, prompt_text: str) -> Task:
    """The task as it must read responses to this prompt: some chat templates open the think block."""
    config = task.config
    if not prompt_text.rstrip().endswith("<think>") or getattr(config, "think_is_open", True):
        return task
    return config.model_copy(update={"think_is_open": True}).build()
