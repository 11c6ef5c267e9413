"""Origins of a data set's rows: a repository of the Hugging Face hub, a Git repository, or a generator here.

The ``datasets`` library reads the files. Code that comes with the data is never executed.
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
    """A published data set. `resolve` and `rows` pass on the libraries' network and file errors."""

    @property
    def revision(self) -> str | None:
        """The revision that is pinned; None if the newest one is read."""

    @property
    def label(self) -> str:
        """Address of the data set for people."""

    def instructions(self, revision: str | None) -> str:
        """Tell the user which files to download by hand, with their addresses."""

    def resolve(self, revision: str | None) -> str:
        """Return the commit that a revision (branch, tag or commit) names."""

    def rows(self, revision: str, folder: Path | None) -> Iterator[Row]:
        """Yield all rows in order, from the network or a local copy."""


@dataclass(frozen=True)
class Hub:
    """A data set repository of the Hugging Face hub.

    Attributes:
        repository: OWNER/NAME of the repository.
        splits: splits to read, one after the other.
        config: subset of the data set; None for the default one.
        files: patterns of the splits' files, for a download by hand.
        num_rows: number of first rows to read; None for all rows.
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
        """Find the path, config and split with which ``datasets`` reads a local copy.

        The copy's card (README.md) names them. Without a card its folders and files do.
        """
        if (folder / "README.md").is_file() or self.config is None:
            return folder, self.config, split
        # Without a card, `datasets` does not know the subsets, and calls the split of a file named dev
        # "validation".
        config_folder = folder / self.config
        split_by_file_name = "validation" if split == "dev" else split
        return (config_folder if config_folder.is_dir() else folder), None, split_by_file_name


@dataclass(frozen=True)
class GitFiles:
    """Files of a public GitHub repository at a commit: parquet tables, or JSON lists with a row per item."""

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
            # Files are loaded one by one, because they may differ in columns that are not used.
            for file in [self._found(folder, path) for path in self.paths]:
                if file.suffix == ".json":
                    yield from ({"row": element} for element in json.loads(file.read_text(encoding="utf-8")))
                else:
                    yield from _load("parquet", None, data_files={"train": [str(file)]}, split="train")

    def _found(self, folder: Path, path: str) -> Path:
        """Find the local copy of a file by its path in the repository, or by its name if that is unique."""
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
    """Generated problems of the task `logic`. They are the same in every preparation.

    Attributes:
        num_problems: number of problems.
        held_out: True for the task's held-out problems, False for its training problems.
        people: numbers of people in a puzzle; each number gets equally many puzzles.
        revision: always None, because a fixed seed decides the problems.
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
        """Draw distinct problems, with equally many of each size."""
        num_of_size = self.num_problems // len(self.people)
        problems: dict[str, Problem] = {}
        sizes: Counter[int] = Counter()
        indices = count()
        while len(problems) < num_of_size * len(self.people):
            problem = task.train_problem(next(indices), SEED)
            size = problem.metadata["num_people"]
            # The endless stream repeats small puzzles, because there are few different ones.
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
    """Load rows. Images stay the bytes of their files, so that they can be written unchanged."""
    from datasets import Image, Sequence, disable_progress_bars, load_dataset

    # This switches off the bars of the conversion to rows. Downloads still show theirs.
    disable_progress_bars()
    dataset = load_dataset(path, config, **options)
    for name, feature in dataset.features.items():
        if isinstance(feature, Image):
            dataset = dataset.cast_column(name, Image(decode=False))
        elif isinstance(getattr(feature, "feature", None), Image):
            dataset = dataset.cast_column(name, Sequence(Image(decode=False)))
    return dataset
