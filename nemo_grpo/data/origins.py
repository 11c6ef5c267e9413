"""Origins of rows: a hub repository, files of a Git repository, or this package, which needs no network.

Files are read by the ``datasets`` library; nothing that comes with the data is executed.
"""

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from nemo_grpo.data.fields import Entry, Row
from nemo_grpo.tasks import Problem, Task
from nemo_grpo.tasks.logic import LogicConfig

TIMEOUT_SECONDS = 60
SEED = 0
"""Seed of generated training problems."""


class Origin(Protocol):
    """A published data set. `resolve` and `rows` raise the libraries' errors of a network or a file."""

    @property
    def revision(self) -> str | None:
        """The pinned revision; None: the newest."""

    @property
    def label(self) -> str:
        """Address, for people."""

    def instructions(self, revision: str | None) -> str:
        """Write which files to download by hand, and their addresses."""

    def resolve(self, revision: str | None) -> str:
        """Find the commit of a revision."""

    def rows(self, revision: str, folder: Path | None) -> Iterator[Row]:
        """Yield all rows in order, from the network or a local copy."""


@dataclass(frozen=True)
class Hub:
    """A data set repository of the Hugging Face hub.

    Attributes:
        repository: OWNER/NAME.
        splits: read one after the other.
        config: the subset; None: the default.
        files: patterns of the files of these splits, for a download by hand.
        num_rows: read only the first rows; None: all.
    """

    repository: str
    splits: tuple[str, ...] = ("train",)
    config: str | None = None
    files: tuple[str, ...] = ()
    revision: str | None = None
    num_rows: int | None = None

    @property
    def label(self) -> str:
        config = f", {self.config}" if self.config else ""
        rows = f"[:{self.num_rows}]" if self.num_rows else ""
        return f"{self.repository} ({'+'.join(self.splits)}{config}{rows})"

    def instructions(self, revision: str | None) -> str:
        include = "".join(f" --include '{pattern}'" for pattern in self.files)
        pin = f" --revision {revision}" if revision else ""
        return f"run `hf download --repo-type dataset {self.repository}{pin}{include} --local-dir DIR`"

    def resolve(self, revision: str | None) -> str:
        from huggingface_hub import HfApi

        sha = HfApi().dataset_info(self.repository, revision=revision).sha
        assert sha is not None
        return sha

    def rows(self, revision: str, folder: Path | None) -> Iterator[Row]:
        return islice(self._all_rows(revision, folder), self.num_rows)

    def _all_rows(self, revision: str, folder: Path | None) -> Iterator[Row]:
        for split in self.splits:
            if folder is None:
                yield from _load(self.repository, self.config, split=split, revision=revision)
            else:
                path, config, name = self._local(folder, split)
                yield from _load(str(path), config, split=name)

    def _local(self, folder: Path, split: str) -> tuple[Path, str | None, str]:
        """Find path, config and split of a copy by its card (README.md), else by its folders and files."""
        if (folder / "README.md").is_file() or self.config is None:
            return folder, self.config, split
        # Without a card `datasets` knows no subsets, and calls the split of a file named dev "validation".
        config_folder = folder / self.config
        split_by_file_name = "validation" if split == "dev" else split
        return (config_folder if config_folder.is_dir() else folder), None, split_by_file_name


@dataclass(frozen=True)
class GitFiles:
    """Files of a public GitHub repository at a commit: tables (parquet), or JSON lists, an element a row."""

    repository: str
    paths: tuple[str, ...]
    revision: str | None = None

    @property
    def label(self) -> str:
        files = self.paths[0]
        if len(self.paths) > 1:
            files += f" and {len(self.paths) - 1} more"
        return f"github.com/{self.repository}: {files}"

    def instructions(self, revision: str | None) -> str:
        commands = []
        for path, url in zip(self.paths, self._urls(self.resolve(revision)), strict=True):
            commands.append(f"curl -fL --create-dirs -o DIR/{path} {url}")
        return f"run `{'; '.join(commands)}`"

    def resolve(self, revision: str | None) -> str:
        return revision or "main"

    def rows(self, revision: str, folder: Path | None) -> Iterator[Row]:
        with TemporaryDirectory() as downloads:
            if folder is None:
                folder = Path(downloads)
                for path, url in zip(self.paths, self._urls(revision), strict=True):
                    _download(url, folder / path)
            # One by one: files of one data set may differ in columns that are not used.
            for file in [self._found(folder, path) for path in self.paths]:
                if file.suffix == ".json":
                    yield from ({"row": element} for element in json.loads(file.read_text(encoding="utf-8")))
                else:
                    yield from _load("parquet", None, data_files={"train": [str(file)]}, split="train")

    def _found(self, folder: Path, path: str) -> Path:
        """Find the copy of a file by its whole path or, if that is unambiguous, by its last part."""
        name = Path(path).name
        candidates = [path]
        if [Path(listed).name for listed in self.paths].count(name) == 1:
            candidates.append(name)
        for candidate in candidates:
            if (folder / candidate).is_file():
                return folder / candidate
        raise FileNotFoundError(f"{folder} has no {path}")

    def _urls(self, revision: str) -> list[str]:
        base = f"https://raw.githubusercontent.com/{self.repository}/{revision}"
        return [f"{base}/{path}" for path in self.paths]


@dataclass(frozen=True)
class Generated:
    """Training or held-out problems of the task `logic`, always the same.

    Attributes:
        num_problems: in all.
        held_out: the task's held-out problems, else its training problems.
        people: sizes of the puzzles, equally often.
        revision: none; the seed decides.
    """

    num_problems: int
    held_out: bool
    people: tuple[int, ...]
    revision: str | None = None

    @property
    def label(self) -> str:
        problems = "held-out" if self.held_out else f"seed {SEED}"
        return f"generated (logic, {problems})"

    def instructions(self, revision: str | None) -> str:
        return "generate it here"

    def resolve(self, revision: str | None) -> str:
        return f"seed {SEED}"

    def rows(self, revision: str, folder: Path | None) -> Iterator[Row]:
        task = LogicConfig(people=self.people, validation_people=self.people).build()
        problems = task.validation_problems(self.num_problems) if self.held_out else self._training(task)
        for problem in sorted(problems, key=lambda problem: problem.metadata["num_people"]):
            yield {"question": problem.question, "answer": problem.answer, "metadata": problem.metadata}

    def _training(self, task: Task) -> list[Problem]:
        """Draw distinct problems, each size equally often."""
        num_of_size = self.num_problems // len(self.people)
        problems: dict[str, Problem] = {}
        sizes: Counter[int] = Counter()
        indices = count()
        while len(problems) < num_of_size * len(self.people):
            problem = task.train_problem(next(indices), SEED)
            size = problem.metadata["num_people"]
            # The stream is endless and repeats small puzzles, of which there are few.
            if problem.id not in problems and sizes[size] < num_of_size:
                problems[problem.id] = problem
                sizes[size] += 1
        return list(problems.values())


def generated(row: Row) -> Entry:
    """Convert a generated row unchanged."""
    return Entry(row["question"], row["answer"], dict(row["metadata"]))


def _download(url: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    from urllib.request import urlopen  # imports ssl, which takes 30 ms

    with urlopen(url, timeout=TIMEOUT_SECONDS) as answer, target.open("wb") as file:
        shutil.copyfileobj(answer, file)


def _load(path: str, config: str | None, **options: Any) -> Iterable[Row]:
    """Load rows with images as their files' bytes, not decoded, so that they can be written unchanged."""
    from datasets import Image, Sequence, disable_progress_bars, load_dataset

    # Those of the conversion; downloads have bars of their own.
    disable_progress_bars()
    dataset = load_dataset(path, config, **options)
    for name, feature in dataset.features.items():
        if isinstance(feature, Image):
            dataset = dataset.cast_column(name, Image(decode=False))
        elif isinstance(getattr(feature, "feature", None), Image):
            dataset = dataset.cast_column(name, Sequence(Image(decode=False)))
    return dataset
