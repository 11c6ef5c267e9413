"""Problems from JSONL files: one object ``{"id", "question", "answer", "metadata"}`` per line.

A missing id is the file's name and the line's number; an id or an answer may be a number. An answer in
GSM8K's form, a worked solution that ends in ``#### 42``, is read as 42, its solution as metadata.solution.
"""

import json
import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from pydantic import Field

from nemo_grpo.support.errors import UserError
from nemo_grpo.tasks.base import Problem, TaskConfig, check_num_validation, stream
from nemo_grpo.tasks.response import render_response

REQUIRED: tuple[tuple[str, tuple[type, ...], str], ...] = (
    ("id", (int,), "a non-empty text or a whole number"),
    ("question", (), "a non-empty text"),
    ("answer", (int, float), "a non-empty text or a number"),
)
"""Key, the types besides text, the rule."""
_CALCULATOR = re.compile(r"<<[^<>\n]*>>")
_WORKED = re.compile(r"(|.*\s)####(?!#)([^\n]*)\s*", re.DOTALL)
VALIDATION_FILES = "nemo_grpo.task.validation_files"
STRATA = ("num_people", "task", "level")
"""Metadata whose values a subset of the validation problems represents in proportion."""


class FileTaskConfig(TaskConfig):
    """Parameters of every task whose problems come from files."""

    train_files: tuple[str, ...] = Field(default=(), strict=False)
    """JSONL files, joined in this order; relative to the working directory."""
    validation_files: tuple[str, ...] = Field(default=(), strict=False)
    """JSONL files of the held-out problems; training drops the same questions."""

    def made_up(self, folder: Path, number: int) -> Self:
        """This task with invented problems in place of its files, for a rehearsal without them.

        Args: folder: gets the files.  number: of training problems, and of validation problems.
        """
        problems = [self.made_up_problem(index, folder) for index in range(2 * number)]
        train = write_problems(folder / "train.jsonl", problems[:number])
        validation = write_problems(folder / "validation.jsonl", problems[number:])
        return self.model_copy(update={"train_files": (train,), "validation_files": (validation,)})

    def made_up_problem(self, number: int, folder: Path) -> Problem:
        """An invented problem, different for each number; ``folder`` is its file's."""
        raise NotImplementedError(f"task {self.name} has no made-up problems")


class FileTask:
    """A finite set of problems: training goes through all of them in a new order in every epoch."""

    def __init__(self, config: FileTaskConfig) -> None:
        """Raises: UserError: see `read_problems`."""
        self.config: Any = config
        self.validation = listed_problems(config, "validation_files")
        self.train = not_held_out(listed_problems(config, "train_files"), self.validation)

    def check_answers(self, read: Callable[[str], object], rule: str) -> None:
        """Refuse a reference that ``read`` gives None for.

        Raises: UserError: the problem and its answer, then ``rule``.
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
        return self.train[_shuffled(len(self.train), seed, epoch)[position]]

    def validation_problems(self, num_problems: int) -> list[Problem]:
        check_num_validation(num_problems, len(self.validation), VALIDATION_FILES)
        if num_problems == len(self.validation):
            return self.validation  # as in the files
        return [self.validation[index] for index in _stratified(self.validation)[:num_problems]]

    def demonstration(self, problem: Problem, rng: random.Random) -> str:
        """The problem's ``metadata["solution"]`` as reasoning, then its answer."""
        return render_response(solution_of(problem), problem.answer)


def not_held_out(problems: Iterable[Problem], held_out: Iterable[Problem]) -> list[Problem]:
    """The problems that training keeps: those with other questions than the held-out ones."""
    questions = set(map(_normalized, held_out))
    return [problem for problem in problems if _normalized(problem) not in questions]


def solution_of(problem: Problem) -> str:
    """The worked solution of a problem from a file.

    Raises: UserError: it has none.
    """
    solution = problem.metadata.get("solution")
    if not isinstance(solution, str):
        raise UserError(
            f"nemo_grpo.task: problem {problem.id!r} has no metadata.solution to show; add one to every "
            "problem, or train on rewards instead, from a model (policy.model_name)"
        )
    return solution


def _stratified(problems: Sequence[Problem]) -> list[int]:
    """Order all indices so that every beginning holds each stratum in proportion to its size."""
    strata: dict[str, list[int]] = {}
    for index, problem in enumerate(problems):
        strata.setdefault(repr([problem.metadata.get(key) for key in STRATA]), []).append(index)
    places: list[tuple[float, int]] = []
    for kind, members in strata.items():
        stream("validation", kind).shuffle(members)
        places += [((rank + 0.5) / len(members), index) for rank, index in enumerate(members)]
    return [index for _, index in sorted(places)]


@lru_cache(maxsize=8)
def _shuffled(num_problems: int, seed: int, epoch: int) -> list[int]:
    order = list(range(num_problems))
    stream("epoch", seed, epoch).shuffle(order)
    return order


def write_problems(path: Path, problems: Iterable[Problem]) -> str:
    """A file as `read_problems` reads it; returns its absolute name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(map(as_line, problems)), encoding="utf-8")
    return str(path.absolute())


def as_line(problem: Problem) -> str:
    """A problem as a line of such a file."""
    return json.dumps(asdict(problem), ensure_ascii=False) + "\n"


def read_problems(paths: Iterable[str | Path], *, with_images: bool = False) -> list[Problem]:
    """All problems of some JSONL files, in order; blank lines are skipped.

    Args:    with_images: every problem needs ``metadata.images``, paths relative to its file; they come back
             joined to the file's folder.
    Raises:  UserError: a file is missing, a line is not such an object, an id is repeated or an image is
             missing; the message names file and line.
    """
    problems: dict[str, Problem] = {}
    for path in map(Path, paths):
        for number, line in _lines(path):
            where = f"{path}:{number}"
            problem = _parse(line, where)
            if problem.id in problems:
                rule = "ids must be unique over all files"
                if problem.id == f"{path.name}:{number}":  # as `_parse` calls a line without one
                    rule = f"it stands for a line without id of a file {path.name}; rename one, or write ids"
                raise UserError(f"{where}: id {problem.id!r} is repeated; {rule}")
            problems[problem.id] = _with_images(problem, path, where) if with_images else problem
    return list(problems.values())


def listed_problems(config: FileTaskConfig, key: str) -> list[Problem]:
    """The problems of a task's ``train_files`` or ``validation_files``.

    Raises: UserError: as `read_problems`; the message begins with the key.
    """
    files = [(path, _state(path)) for path in map(Path, getattr(config, key))]
    try:
        return list(_read_once(tuple(files), config.needs_images))
    except UserError as error:
        raise UserError(f"nemo_grpo.task.{key}: {error}") from error


def _state(path: Path) -> tuple[int, int] | None:
    """Return a stamp that changes with the file; None: it is missing."""
    return ((found := path.stat()).st_mtime_ns, found.st_size) if path.is_file() else None


@lru_cache(maxsize=4)  # several rules ask for the same files
def _read_once(
    files: tuple[tuple[Path, tuple[int, int] | None], ...], with_images: bool
) -> tuple[Problem, ...]:
    return tuple(read_problems([path for path, _ in files], with_images=with_images))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8") as file:
            yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror}; `nemo-grpo data prepare NAME --out DIR` writes such files"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 ({error.reason} at byte {error.start}); convert it") from error


def parse_object(line: str | bytes, where: str) -> dict[str, Any]:
    """One line as an object.

    Raises: UserError: it is none; the message begins with ``where``.
    """
    array = f"{where}: a JSON array; write one object per line, as `jq -c .[]` does"
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        if isinstance(error, ValueError) and line.lstrip()[:1] in ("[", b"["):
            raise UserError(array) from error
        raise UserError(f"{where}: not JSON ({error}); write one object per line") from error
    if isinstance(entry, list):
        raise UserError(array)
    if not isinstance(entry, dict):
        raise UserError(f"{where}: {type(entry).__name__} instead of an object; write one object per line")
    return entry


def _parse(line: str, where: str) -> Problem:
    entry = parse_object(line, where)
    columns = ", ".join(entry)
    entry.setdefault("id", where.rpartition("/")[2])
    for key, kinds, rule in REQUIRED:
        value: Any = entry.get(key)
        if type(value) in kinds and (value == value and abs(value) != math.inf):
            entry[key] = str(value)
        elif not isinstance(value, str) or not value.strip():
            missing = f"{key} is missing among {columns or 'no keys'}; it"
            given = f"{key}={json.dumps(value)}" if key in entry else missing
            raise UserError(f"{where}: {given} must be {rule}")
    if "\\u" in line:
        _check_characters(entry, where)
    metadata: Any = entry.get("metadata", {})
    if not isinstance(metadata, dict):
        raise UserError(f"{where}: metadata={metadata!r} must be an object")
    answer = entry["answer"]
    if (worked := worked_answer(answer)) is not None:
        solution, answer = worked
        metadata = {**metadata, "solution": metadata.get("solution", solution)}
        if not answer:
            raise UserError(f"{where}: answer ends in '####' without an answer; write it there, as '#### 42'")
    return Problem(entry["id"], entry["question"], answer, metadata)


def worked_answer(text: str) -> tuple[str, str] | None:
    """Solution and final answer of GSM8K's form, ``.. <<1+1=2>> .. #### 1,234``, on one line or several.

    The calculator's notes and the commas between digits are left out; None for a text in another form.
    """
    if (found := _WORKED.fullmatch(text)) is None:
        return None
    solution, answer = found.groups()
    return _CALCULATOR.sub("", solution).strip(), re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", answer.strip())


def _check_characters(entry: dict[str, Any], where: str) -> None:
    """Refuse lone surrogates: valid JSON, but no tokenizer or UTF-8 file accepts them."""
    try:
        json.dumps(entry, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise UserError(
            f"{where}: {half} is half of a character (a lone surrogate); correct the text"
        ) from error


def _with_images(problem: Problem, path: Path, where: str) -> Problem:
    images = problem.metadata.get("images")
    if not isinstance(images, list) or not images or not all(isinstance(image, str) for image in images):
        raise UserError(f"{where}: metadata.images={images!r} must be a list of paths relative to the file")
    found = [path.parent / image for image in images]
    for image in found:
        if not image.is_file():
            raise UserError(f"{where}: image {image} is missing")
    metadata = {**problem.metadata, "images": [str(image) for image in found]}
    return Problem(problem.id, problem.question, problem.answer, metadata)


def _normalized(problem: Problem) -> tuple[str, str]:
    return " ".join(problem.question.split()), repr(problem.metadata.get("images"))
