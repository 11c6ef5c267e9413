"""Benchmarks: prepared data sets, JSONL files, a recipe's own held-out problems."""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nemo_grpo.data.manifest import read_manifest
from nemo_grpo.data.sources import find_source
from nemo_grpo.evaluate.config import EvalConfig
from nemo_grpo.support.errors import UserError, did_you_mean
from nemo_grpo.support.files import read_yaml, sha256_of
from nemo_grpo.tasks import PRESETS, TASKS, Problem, Prompt, Task, TaskConfig, encode_prompt
from nemo_grpo.tasks.base import MultiTurnTask
from nemo_grpo.tasks.jsonl import FileTaskConfig, read_problems
from nemo_grpo.tasks.rows import PARQUET

log = logging.getLogger(__name__)

_PROMPTS: dict[str, Any] = read_yaml(Path(__file__).with_name("prompts.yaml"))
DEFAULT_PROMPTS: dict[str, str] = _PROMPTS["defaults"]
"""Task -> default prompt preset."""
TASK_OPTIONS: dict[str, dict[str, Any]] = _PROMPTS["task_options"]
"""Preset -> task parameters that match the answer format which the prompt asks for."""
RECIPE = "recipe"
"""Name of a recipe's held-out problems as a benchmark, and of its prompt as a preset."""


@dataclass(frozen=True)
class Benchmark:
    """Problems, their task and their prompt.

    Attributes:
        name: name of the benchmark in the results.
        task: scores the responses.
        problems: problems to evaluate.
        prompt: text that is put around each problem.
        prompt_name: name of the prompt's preset, or ``recipe``.
        by_recipe: True if the prompt or the task's parameters come from a recipe.
        path: file of the problems; None if they are a recipe's own.
        digest: SHA-256 of that file.
    """

    name: str
    task: Task
    problems: list[Problem]
    prompt: Prompt
    prompt_name: str
    by_recipe: bool = False
    path: Path | None = None
    digest: str | None = None

    def identity(self, num_problems: int) -> dict[str, Any]:
        """Return JSON values that identify the benchmark in a summary.

        Results with different values must not be mixed.

        Args:
            num_problems: number of problems that have results; only these enter the hash of a recipe's
                own problems.
        """
        digest = self.digest
        if digest is None:
            digest = problems_digest(self.problems[:num_problems])
        recipe_settings = None
        if self.by_recipe:
            # The paths of the files are left out, so that data may be moved. ``sha256`` tells its content.
            file_keys = {"train_files", "validation_files"}
            recipe_settings = {
                "prompt": self.prompt.model_dump(mode="json", exclude={"preset"}),
                "task": self.task.config.model_dump(mode="json", exclude=file_keys),
            }
        return {"sha256": digest, "prompt": self.prompt_name, "recipe": recipe_settings}

    def response_key(self, conditions: Mapping[str, Any]) -> str:
        """Hash everything that decides the responses: model files, sampling, prompt, benchmark file.

        The parameters of a multi-turn task are included, because its tool's answers are part of a response.
        The parameters of other tasks only decide the grading, and recorded responses are graded anew. A
        recipe's own problems have no file; each recorded line identifies its problem instead.
        """
        task = None
        if isinstance(self.task, MultiTurnTask):
            task = self.task.config.model_dump(mode="json")
        prompt = self.prompt.model_dump(mode="json")
        # Each line of the file records its seed, so that one file with one greedy response serves all seeds.
        without_seed = {name: value for name, value in conditions.items() if name != "seed"}
        everything = json.dumps([without_seed, prompt, self.digest, task], sort_keys=True)
        return hashlib.sha256(everything.encode()).hexdigest()[:12]

    def as_prompted(self, tokenizer: Any) -> Task:
        """Return the task as it must read responses to this prompt.

        If the chat template ends the prompt with ``<think>``, the responses begin inside the think block, and
        the task must know that. A recipe's own problems are read as in training.
        """
        config = self.task.config
        # A task without this parameter reads every response in the same way.
        if self.path is None or getattr(config, "think_is_open", True):
            return self.task
        # One prompt is enough, because the chat template writes the same end for all problems.
        prompt = encode_prompt(tokenizer, self.prompt, self.problems[0], with_images=config.needs_images)
        if not tokenizer.decode(prompt, skip_special_tokens=False).rstrip().endswith("<think>"):
            return self.task
        return config.model_copy(update={"think_is_open": True}).build()


def load_benchmarks(config: EvalConfig) -> list[Benchmark]:
    """Load the benchmarks of an evaluation."""
    listed = config.benchmarks
    if listed is None:
        if config.section is None:
            raise UserError("nemo-grpo eval needs --benchmarks, --recipe, or both")
        listed = RECIPE
    benchmarks = [load_benchmark(item.strip(), config) for item in listed.split(",") if item.strip()]
    names = {benchmark.name for benchmark in benchmarks}
    if not benchmarks or len(names) < len(benchmarks):
        raise UserError(f"--benchmarks {listed}: name one or more, each once and with a distinct name")
    return benchmarks


COLUMNS = "nemo_grpo.task.columns"


def load_benchmark(item: str, config: EvalConfig) -> Benchmark:
    """Load one benchmark.

    Args:
        item: name of a prepared data set, path of a JSONL or Parquet file, or ``recipe`` for the held-out
            problems of a recipe.
        config: configuration of the evaluation.
    """
    path = None if item == RECIPE else _path_of(item, Path(config.data_dir))
    base, base_by_recipe = _task_config(path, config)
    prompt, prompt_name = _prompt(path, base.name, config)
    by_recipe = base_by_recipe or prompt_name == RECIPE
    if base.needs_images and not config.uses_vllm:
        raise UserError(
            f"--benchmarks {item}: task {base.name} has images, which the generator vllm alone takes; add "
            "--generator vllm"
        )
    options = TASK_OPTIONS.get(prompt_name, {})
    task_options = {key: value for key, value in options.items() if key in type(base).model_fields}
    adapted = base.model_copy(update=task_options)
    if path is None:
        assert config.section is not None
        task = adapted.build()
        problems = task.validation_problems(config.num_problems or config.section.evaluation.num_problems)
        return Benchmark(RECIPE, task, problems, prompt, prompt_name, by_recipe)
    # Read here first, because errors of the task would name a recipe's key instead of --benchmarks.
    try:
        problems = read_problems([path], with_images=base.needs_images, columns=getattr(base, "columns", {}))
    except UserError as error:
        message = str(error)
        if not by_recipe:
            # Without a recipe, this command has no such key.
            message = message.replace(COLUMNS, f"in a recipe that --recipe names {COLUMNS}")
        raise UserError(f"--benchmarks {item}: {message}") from None
    task = adapted.build()
    problems = problems[: config.num_problems]
    if not problems:
        raise UserError(f"--benchmarks {item}: {path} holds no problems")
    digest = sha256_of(path)
    manifest = read_manifest(path)
    if manifest is not None and manifest.get("sha256") != digest:
        log.warning("%s does not match its manifest; see `nemo-grpo data verify`", path)
    return Benchmark(path.stem, task, problems, prompt, prompt_name, by_recipe, path, digest)


def _path_of(item: str, data_dir: Path) -> Path:
    """Return the file of a benchmark: ``item`` if it is a file, or the prepared data set of this name."""
    path = Path(item)
    if path.suffix in (".jsonl", PARQUET):
        return path
    path = data_dir / f"{find_source(item).name}.jsonl"
    if not path.is_file():
        raise UserError(
            f"--benchmarks {item}: {path} is missing; run `nemo-grpo data prepare {path.stem} --out "
            f"{data_dir}`, or give the path of a JSONL or Parquet file"
        )
    return path


def _recipe_task(config: EvalConfig) -> TaskConfig | None:
    return None if config.section is None else config.section.task


def _task_config(path: Path | None, config: EvalConfig) -> tuple[TaskConfig, bool]:
    """Choose the task's configuration.

    Args:
        path: file of the problems; None for a recipe's held-out problems.
        config: configuration of the evaluation.

    Returns:
        The configuration, and True if a recipe sets some of it.
    """
    recipe_task = _recipe_task(config)
    if path is None:
        if recipe_task is None:
            raise UserError(
                f"--benchmarks {RECIPE} are the held-out problems of a recipe's nemo_grpo.task; add --recipe "
                "with one, or name files or prepared sets"
            )
        return recipe_task, True
    manifest = read_manifest(path)
    task_name = config.task
    if not task_name:
        task_name = str(manifest.get("task", "math")) if manifest else "math"
    file_tasks = {name: task for name, task in TASKS.items() if issubclass(task, FileTaskConfig)}
    if task_name not in file_tasks:
        raise UserError(f"--task {task_name} reads no files{did_you_mean(task_name, file_tasks)}")
    parameters: dict[str, Any] = {}
    is_recipe_task = recipe_task is not None and recipe_task.name == task_name
    if recipe_task is not None and is_recipe_task:
        parameters = recipe_task.model_dump()
    parameters |= {"validation_files": (str(path),), "train_files": ()}
    if manifest:
        parameters["columns"] = {}  # a prepared set has the standard columns
    return file_tasks[task_name](**parameters), is_recipe_task


def _prompt(path: Path | None, task_name: str, config: EvalConfig) -> tuple[Prompt, str]:
    """Choose a benchmark's prompt and its name: --prompt, else the recipe's, else the benchmark's default.

    Args:
        path: file of the problems; None for a recipe's held-out problems.
        task_name: name of the benchmark's task.
        config: configuration of the evaluation.
    """
    has_recipe_prompt = _recipe_task(config) is not None
    preset = config.prompt
    if preset is None and not has_recipe_prompt:
        # A protocol's presets come before our defaults. A preset for this benchmark comes before one for its
        # whole task.
        if path is not None:
            preset = config.presets.get(path.stem)
        if not preset:
            preset = config.presets.get(task_name, DEFAULT_PROMPTS.get(task_name))
    if preset is not None:
        if preset not in PRESETS:
            raise UserError(f"--prompt {preset} is unknown{did_you_mean(preset, PRESETS)}")
        return Prompt(preset=preset), preset
    if config.section is not None and has_recipe_prompt:
        return config.section.prompt, RECIPE
    return Prompt(), "none"


def problems_digest(problems: Sequence[Problem]) -> str:
    """Hash the problems with their answers and order."""
    everything = json.dumps([asdict(problem) for problem in problems], sort_keys=True)
    return hashlib.sha256(everything.encode()).hexdigest()
