"""Benchmarks: prepared data sets, JSONL files, a recipe's own held-out problems."""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from nemo_grpo.data.manifest import read_manifest
from nemo_grpo.data.sources import find_source
from nemo_grpo.evaluate.config import EvalConfig
from nemo_grpo.support.errors import UserError, did_you_mean
from nemo_grpo.support.files import sha256_of
from nemo_grpo.tasks import PRESETS, TASKS, Problem, Prompt, Task, TaskConfig, encode_prompt
from nemo_grpo.tasks.base import MultiTurnTask
from nemo_grpo.tasks.jsonl import FileTaskConfig, read_problems
from nemo_grpo.tasks.rows import PARQUET

log = logging.getLogger(__name__)

_PROMPTS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("prompts.yaml").read_text())
DEFAULT_PROMPTS: dict[str, str] = _PROMPTS["defaults"]
"""Task -> default prompt preset."""
TASK_OPTIONS: dict[str, dict[str, Any]] = _PROMPTS["task_options"]
"""Preset -> task parameters that match the answer format which the prompt asks for."""
RECIPE = "recipe"
"""Name of a recipe's held-out problems as a benchmark, and of its prompt as a preset."""


@dataclass(frozen=True)
class Benchmark:
    """Problems, their task and their prompt.

    Attributes: prompt_name: the preset, or ``recipe``.  by_recipe: a recipe's prompt or task parameters are
                used.  path, digest: file of the problems, and its hash; None: a recipe's own.
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
        """Return JSON values that identify the benchmark: results with other values belong to another one.

        Args: num_problems: number of results; later problems do not count.
        """
        digest = self.digest or problems_digest(self.problems[:num_problems])
        files = {"train_files", "validation_files"}
        of_recipe = {
            "prompt": self.prompt.model_dump(mode="json", exclude={"preset"}),
            "task": self.task.config.model_dump(mode="json", exclude=files),
        }
        by_recipe = of_recipe if self.by_recipe else None
        return {"sha256": digest, "prompt": self.prompt_name, "recipe": by_recipe}

    def response_key(self, conditions: Mapping[str, Any]) -> str:
        """Hash all that decides the responses: model files, sampling, prompt, benchmark file.

        A multi-turn task's parameters belong to it: its tool's answers are part of the response. Grading is
        not: recorded responses are graded anew. A recipe's own problems have no file; each recorded line
        identifies its problem.
        """
        multi_turn = isinstance(self.task, MultiTurnTask)
        task = self.task.config.model_dump(mode="json") if multi_turn else None
        prompt = self.prompt.model_dump(mode="json")
        # the seed stands in each line, as the greedy responses serve all seeds
        decides = {name: value for name, value in conditions.items() if name != "seed"}
        everything = json.dumps([decides, prompt, self.digest, task], sort_keys=True)
        return hashlib.sha256(everything.encode()).hexdigest()[:12]

    def as_prompted(self, tokenizer: Any) -> Task:
        """Return the task that reads responses to this prompt: some chat templates open the think block.

        A recipe's own problems are read as in training.
        """
        config = self.task.config
        if self.path is None or getattr(config, "think_is_open", True):
            return self.task
        prompt = encode_prompt(tokenizer, self.prompt, self.problems[0], with_images=config.needs_images)
        if not tokenizer.decode(prompt, skip_special_tokens=False).rstrip().endswith("<think>"):
            return self.task
        return config.model_copy(update={"think_is_open": True}).build()


def load_benchmarks(config: EvalConfig) -> list[Benchmark]:
    """Load the benchmarks of an evaluation."""
    items = config.benchmarks
    if items is None:
        if config.section is None:
            raise UserError("nemo-grpo eval needs --benchmarks, --recipe, or both")
        items = RECIPE
    loaded = [load_benchmark(item.strip(), config) for item in items.split(",") if item.strip()]
    if not loaded or len({benchmark.name for benchmark in loaded}) < len(loaded):
        raise UserError(f"--benchmarks {items}: name one or more, each once and with a distinct name")
    return loaded


COLUMNS = "nemo_grpo.task.columns"


def load_benchmark(item: str, config: EvalConfig) -> Benchmark:
    """Load a data set by name, a JSONL or Parquet file, or ``recipe``: a recipe's held-out problems."""
    path = None if item == RECIPE else _path_of(item, Path(config.data_dir))
    base, prompt, prompt_name, by_recipe = _asked(path, config)
    if base.needs_images and not config.uses_vllm:
        raise UserError(
            f"--benchmarks {item}: task {base.name} has images, which the generator vllm alone takes; add "
            "--generator vllm"
        )
    options = TASK_OPTIONS.get(prompt_name, {})
    known = {key: value for key, value in options.items() if key in type(base).model_fields}
    adapted = base.model_copy(update=known)
    if path is None:
        assert config.section is not None
        task = adapted.build()
        problems = task.validation_problems(config.num_problems or config.section.evaluation.num_problems)
        return Benchmark(RECIPE, task, problems, prompt, prompt_name, by_recipe)
    try:  # before the task reads the file and names the recipe's key for it
        read = read_problems([path], with_images=base.needs_images, columns=getattr(base, "columns", {}))
    except UserError as error:
        message = str(error)
        if not by_recipe:  # without a recipe, this command has no such key
            message = message.replace(COLUMNS, f"in a recipe that --recipe names {COLUMNS}")
        raise UserError(f"--benchmarks {item}: {message}") from None
    task = adapted.build()
    problems = read[: config.num_problems]
    if not problems:
        raise UserError(f"--benchmarks {item}: {path} holds no problems")
    digest, manifest = sha256_of(path), read_manifest(path)
    if manifest is not None and manifest.get("sha256") != digest:
        log.warning("%s does not match its manifest; see `nemo-grpo data verify`", path)
    return Benchmark(path.stem, task, problems, prompt, prompt_name, by_recipe, path, digest)


def _path_of(item: str, data_dir: Path) -> Path:
    path = Path(item)
    if path.suffix not in (".jsonl", PARQUET):
        path = data_dir / f"{find_source(item).name}.jsonl"
        if not path.is_file():
            raise UserError(
                f"--benchmarks {item}: {path} is missing; run `nemo-grpo data prepare {path.stem} --out "
                f"{data_dir}`, or give the path of a JSONL or Parquet file"
            )
    return path


def _asked(path: Path | None, asked: EvalConfig) -> tuple[TaskConfig, Prompt, str, bool]:
    """Choose (task configuration, prompt, the prompt's name, True if a recipe sets any of it)."""
    recipe, task = asked.section, asked.section.task if asked.section else None
    config: TaskConfig
    if path is None:
        if task is None:
            raise UserError(
                f"--benchmarks {RECIPE} are the held-out problems of a recipe's nemo_grpo.task; add --recipe "
                "with one, or name files or prepared sets"
            )
        config, of_recipe = task, True
    else:
        manifest = read_manifest(path)
        name = asked.task or str((manifest or {}).get("task", "math"))
        of_recipe = task is not None and task.name == name
        given = task.model_dump() if task is not None and of_recipe else {}
        files: dict[str, Any] = {"validation_files": (str(path),), "train_files": ()}
        files |= {"columns": {}} if manifest else {}  # a prepared set has its own
        kinds = {name: kind for name, kind in TASKS.items() if issubclass(kind, FileTaskConfig)}
        if name not in kinds:
            raise UserError(f"--task {name} reads no files{did_you_mean(name, kinds)}")
        config = kinds[name](**{**given, **files})
    preset = asked.prompt
    if preset is None and task is None:
        by_name = None if path is None else asked.presets.get(path.stem)
        preset = by_name or {**DEFAULT_PROMPTS, **asked.presets}.get(config.name)
    if preset is not None:
        if preset not in PRESETS:
            raise UserError(f"--prompt {preset} is unknown{did_you_mean(preset, PRESETS)}")
        return config, Prompt(preset=preset), preset, of_recipe
    if recipe is not None and task is not None:
        return config, recipe.prompt, RECIPE, True
    return config, Prompt(), "none", of_recipe


def problems_digest(problems: Sequence[Problem]) -> str:
    """Hash the problems with their answers and order."""
    everything = json.dumps([asdict(problem) for problem in problems], sort_keys=True)
    return hashlib.sha256(everything.encode()).hexdigest()
