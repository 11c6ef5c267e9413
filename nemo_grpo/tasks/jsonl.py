"""Tasks whose problems come from JSONL and Parquet files."""

import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from itertools import islice, zip_longest
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, PrivateAttr, Strict, field_validator

from nemo_grpo.support.errors import UserError
from nemo_grpo.tasks.base import (
    VALIDATION_SET,
    Problem,
    TaskConfig,
    by_validation_set,
    check_num_validation,
    stream,
)
from nemo_grpo.tasks.response import render_response
from nemo_grpo.tasks.rows import Columns, Key, has_column, problem_of, read_rows

VALIDATION_FILES = "nemo_grpo.task.validation_files"
STRATA = ("num_people", "task", "level")
"""Metadata whose values a subset of the validation problems represents in proportion."""


class FileTaskConfig(TaskConfig):
    """Base of the parameters of tasks whose problems come from files."""

    train_files: tuple[str, ...] = Field(default=(), strict=False)
    """JSONL or Parquet files, joined in this order; relative to the working directory."""
    validation_files: Annotated[tuple[str, ...], Strict(False)] | dict[str, str] = ()
    """Files of the held-out problems, whose questions training drops. Each is a validation set, named by its
    file, or ``{name: file}``."""
    columns: dict[Key, str] = Field(default_factory=dict)
    """Columns of files without question and answer, {question: prompt, answer: reward_model.ground_truth}."""
    _keeps_order: bool = PrivateAttr(False)

    def in_file_order(self) -> Self:
        """Copy the parameters for a task that trains in the files' order, as data.shuffle=false asks."""
        # A private attribute, because recipes set the order by data.shuffle and not by a key of the task.
        copied = self.model_copy()
        copied._keeps_order = True
        return copied

    @field_validator("validation_files")
    @classmethod
    def _sets_have_names(cls, files: tuple[str, ...] | dict[str, str]) -> tuple[str, ...] | dict[str, str]:
        if isinstance(files, dict):
            return files
        names = {Path(file).stem for file in files}
        if len(names) < len(files):
            raise ValueError("two files give their sets one name; write {name: FILE, other: FILE}")
        return files

    @property
    def validation_sets(self) -> dict[str, str]:
        """Name of each validation set -> its file."""
        files = self.validation_files
        if isinstance(files, dict):
            return files
        return {Path(file).stem: file for file in files}

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.train_files, *self.validation_sets.values())

    def made_up(self, folder: Path, number: int) -> Self:
        """Replace the task's files by invented problems, for a rehearsal without them.

        Args:
            folder: gets the files.
            number: number of training problems, and of validation problems.
        """
        problems = [self.made_up_problem(index, folder) for index in range(2 * number)]
        train_file = write_problems(folder / "train.jsonl", problems[:number])
        set_names = list(self.validation_sets) or ["validation"]
        validation_files: dict[str, str] = {}
        for place, set_name in enumerate(set_names):
            path = folder / f"validation-{set_name}.jsonl"
            validation_files[set_name] = write_problems(path, problems[number + place :: len(set_names)])
        update = {
            "train_files": (train_file,),
            "validation_files": validation_files if len(set_names) > 1 else tuple(validation_files.values()),
            "columns": {},
        }
        return self.model_copy(update=update)

    def made_up_problem(self, number: int, folder: Path) -> Problem:
        """Invent a problem, different for each number.

        Args:
            number: the problem's number.
            folder: folder of the file that gets the problem, for its images.
        """
        raise NotImplementedError(f"task {self.name} has no made-up problems")


class FileTask:
    """A finite set of problems: training goes through all of them in a new order in every epoch.

    With data.shuffle=false every epoch has the files' order.
    """

    def __init__(self, config: FileTaskConfig) -> None:
        self.config: Any = config
        self.validation = listed_problems(config, "validation_files")
        self.train = not_held_out(listed_problems(config, "train_files"), self.validation)

    def check_answers(self, read: Callable[[str], object], rule: str) -> None:
        """Refuse reference answers that the task cannot read.

        Args:
            read: returns None for such an answer.
            rule: end of the message, such as "is not a whole number".
        """
        for problem in (*self.train, *self.validation):
            if read(problem.answer) is None:
                raise UserError(f"problem {problem.id!r}: answer={problem.answer!r} {rule}")

    @property
    def num_train_problems(self) -> int:
        """Problems of an epoch; at least 1, so that requesting the first reports what is missing."""
        return max(1, len(self.train))

    def train_problem(self, index: int, seed: int) -> Problem:
        if not self.train:
            raise UserError(
                "nemo_grpo.task.train_files: no training problems; name a JSONL file that holds others "
                f"than {VALIDATION_FILES}"
            )
        epoch, position = divmod(index, len(self.train))
        if self.config._keeps_order:
            return self.train[position]
        return self.train[_shuffled(len(self.train), seed, epoch)[position]]

    def validation_problems(self, num_problems: int) -> list[Problem]:
        """Take problems from every validation set: in proportion to its size, but at least one."""
        check_num_validation(num_problems, len(self.validation), VALIDATION_FILES)
        if num_problems == len(self.validation):
            return self.validation  # in the files' order
        ordered = [self.validation[index] for index in _stratified(self.validation)]
        first_of_sets = [problems[0] for problems in by_validation_set(ordered).values()]
        if num_problems < len(first_of_sets):
            raise UserError(
                f"grpo.max_val_samples={num_problems}: {VALIDATION_FILES} has {len(first_of_sets)} sets; use "
                f"{len(first_of_sets)} or more"
            )
        remaining = [problem for problem in ordered if problem not in first_of_sets]
        return (first_of_sets + remaining)[:num_problems]

    def demonstration(self, problem: Problem, rng: random.Random) -> str:
        """Show the problem's ``metadata["solution"]`` as reasoning, then its answer."""
        return render_response(solution_of(problem), problem.answer)


def not_held_out(problems: Iterable[Problem], held_out: Iterable[Problem]) -> list[Problem]:
    """Drop training problems that ask a held-out question."""
    questions = set(map(question_of, held_out))
    return [problem for problem in problems if question_of(problem) not in questions]


def solution_of(problem: Problem) -> str:
    """Return the worked solution of a problem from a file; refuse a problem without one."""
    solution = problem.metadata.get("solution")
    if not isinstance(solution, str):
        raise UserError(
            f"nemo_grpo.task: problem {problem.id!r} has no metadata.solution to show; add one to every "
            "problem, or train on rewards instead, from a model (policy.model_name)"
        )
    return solution


def _stratified(problems: Sequence[Problem]) -> list[int]:
    """Order all indices so that the first N represent each stratum in proportion to its size, for any N."""
    strata: dict[str, list[int]] = {}
    for index, problem in enumerate(problems):
        values = repr([problem.metadata.get(key) for key in STRATA])
        stratum = problem.metadata.get(VALIDATION_SET, "") + values
        strata.setdefault(stratum, []).append(index)
    # The members of a stratum are spread evenly over (0, 1); sorting merges the strata in proportion.
    places: list[tuple[float, int]] = []
    for stratum, members in strata.items():
        # Each stratum has its own random stream, so that adding files does not change its order.
        stream("validation", stratum).shuffle(members)
        places += [((rank + 0.5) / len(members), index) for rank, index in enumerate(members)]
    return [index for _, index in sorted(places)]


@lru_cache(maxsize=8)
def _shuffled(num_problems: int, seed: int, epoch: int) -> list[int]:
    order = list(range(num_problems))
    stream("epoch", seed, epoch).shuffle(order)
    return order


def write_problems(path: Path, problems: Iterable[Problem]) -> str:
    """Write a file for `read_problems`; returns its absolute name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(map(as_line, problems)), encoding="utf-8")
    return str(path.absolute())


def as_line(problem: Problem) -> str:
    """Write a problem as a line for `read_problems`."""
    entry = asdict(problem)
    history = entry.pop("history")
    if history:
        entry["question"] = [*history, {"role": "user", "content": problem.question}]
    return json.dumps(entry, ensure_ascii=False) + "\n"


def read_problems(
    paths: Iterable[str | Path],
    *,
    with_images: bool = False,
    columns: Columns | None = None,
    sets: Sequence[str] = (),
) -> list[Problem]:
    """Read all problems of JSONL or Parquet files, in order.

    Args:
        paths: paths of the files.
        with_images: every problem needs ``metadata.images``, paths relative to its file. The problems
            returned have them joined to the file's folder.
        columns: see `FileTaskConfig`.
        sets: name of each file's validation set, for the metadata; empty: the sets are not named.
    """
    problems: dict[str, Problem] = {}
    for path, set_name in zip_longest(map(Path, paths), sets):
        for number, row in read_rows(path):
            where = f"{path}:{number}"
            problem = problem_of(row, columns or {}, where)
            if set_name is not None:
                problem = replace(problem, metadata={**problem.metadata, VALIDATION_SET: set_name})
            if problem.id in problems:
                rule = "ids must be unique over all files"
                # `problem_of` gives this id to a row that has none.
                if problem.id == f"{path.name}:{number}":
                    rule = f"it stands for a row without id of a file {path.name}; rename one, or write ids"
                raise UserError(f"{where}: id {problem.id!r} is repeated; {rule}")
            problems[problem.id] = _with_images(problem, path, where) if with_images else problem
    return list(problems.values())


def listed_problems(config: FileTaskConfig, key: str) -> list[Problem]:
    """Read a task's ``train_files`` or ``validation_files``.

    If there are several validation sets, each problem's metadata name its set.
    """
    paths = config.train_files
    set_names: tuple[str, ...] = ()
    if key == "validation_files":
        paths = tuple(config.validation_sets.values())
        if len(paths) > 1:
            set_names = tuple(config.validation_sets)
    stamped_files = tuple((Path(path), _stamp(Path(path))) for path in paths)
    try:
        return list(_read_once(stamped_files, config.needs_images, tuple(config.columns.items()), set_names))
    except UserError as error:
        raise UserError(f"nemo_grpo.task.{key}: {error}") from error


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return a file's time and size, which show that it has changed; None if it is missing."""
    if not path.is_file():
        return None
    status = path.stat()
    return status.st_mtime_ns, status.st_size


# Several rules of `recipe check` ask for the same files, and a run builds its task more than once.
@lru_cache(maxsize=4)
def _read_once(
    files: tuple[tuple[Path, tuple[int, int] | None], ...],
    with_images: bool,
    columns: tuple[tuple[Key, str], ...],
    sets: tuple[str, ...],
) -> tuple[Problem, ...]:
    paths = [path for path, _ in files]
    return tuple(read_problems(paths, with_images=with_images, columns=dict(columns), sets=sets))


def _with_images(problem: Problem, path: Path, where: str) -> Problem:
    images = problem.metadata.get("images")
    if not isinstance(images, list) or not images or not all(isinstance(image, str) for image in images):
        raise UserError(f"{where}: metadata.images={images!r} must be a list of paths relative to the file")
    image_paths = [path.parent / image for image in images]
    for image_path in image_paths:
        if not image_path.is_file():
            raise UserError(f"{where}: image {image_path} is missing")
    if any(message["role"] != "system" for message in problem.history):
        raise UserError(f"{where}: earlier turns beside images; a prompt with images is one message")
    return replace(problem, metadata={**problem.metadata, "images": list(map(str, image_paths))})


def question_of(problem: Problem) -> tuple[str, str]:
    """Return a key that is equal for equal questions: the text, whatever its white space, and the images."""
    # The turns before the question are left out: a system text in one of two files would otherwise hide that
    # training has a held-out question.
    return " ".join(problem.question.split()), repr(problem.metadata.get("images"))


def check_columns(config: FileTaskConfig) -> None:
    """Refuse a mapped column that no file has: the files' standard columns would be read instead."""
    first_rows = [row for file in config.files for _, row in islice(read_rows(Path(file)), 1)]
    for key, column in config.columns.items():
        if first_rows and not any(has_column(row, column) for row in first_rows):
            raise UserError(
                f"nemo_grpo.task.columns.{key}={column}: no file has this column; the first has "
                f"{', '.join(first_rows[0])}"
            )
