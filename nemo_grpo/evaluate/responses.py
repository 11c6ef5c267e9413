"""Responses on disk as they come, so that a killed evaluation can resume."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

from nemo_grpo.errors import UserError
from nemo_grpo.files import hold_lock
from nemo_grpo.sampling.episodes import Written
from nemo_grpo.tasks import Problem

GREEDY = "greedy"
"""The sample number of a greedy response."""


class Entry(NamedTuple):
    """A response to a problem's prompt; ``number``: among the samples to that prompt, 0 if greedy."""

    problem: str
    prompt: Sequence[int]
    greedy: bool
    number: int
    response: Written


class Recall(Protocol):
    """Remembers the responses to problems under one set of conditions."""

    def get(self, problem: str, prompt: Sequence[int], greedy: bool, count: int) -> list[Written | None]:
        """The ``count`` responses to a prompt; None: not known."""
        ...

    def put(self, responses: Sequence[Entry]) -> None:
        """Remember responses."""
        ...


class ResponseLog:
    """Responses in a JSONL file, a line each; new ones are appended and are on disk when `write` returns.

    A line's ``key`` is a hash of everything that the response depends on, so a changed model, prompt or
    setting finds no match and keeps the old lines. A last line truncated by a kill is dropped. One process at
    a time.
    """

    def __init__(self, path: Path) -> None:
        """Raises: UserError: another evaluation has the file, or a line is damaged."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        try:
            hold_lock(self._file, f"{path} is being written by another evaluation; give each its own --out")
            self._known = self._read()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._known)

    def read(self, key: str, sample: int | str) -> Written | None:
        """The response of this key and number, if it is known."""
        return self._known.get((key, sample))

    def write(self, lines: Sequence[dict[str, Any]]) -> None:
        """Append records with ``key``, ``sample`` and the fields of `Written`, in one piece."""
        self._file.write("".join(json.dumps(line) + "\n" for line in lines).encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        self._known |= dict(map(_entry, lines))

    def _read(self) -> dict[tuple[str, int | str], Written]:
        self._file.seek(0)
        content = self._file.read()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            self._file.truncate(len(whole))
        known = {}
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                key, sampled = _entry(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{self.path}:{number} is damaged ({error}); remove that line") from error
            known[key] = sampled
        return known


def _entry(line: Mapping[str, Any]) -> tuple[tuple[str, int | str], Written]:
    return (line["key"], line["sample"]), Written(line["text"], line["num_tokens"], line["truncated"])


@dataclass(frozen=True)
class Resumable:
    """A `Recall` for one benchmark and one set of conditions.

    Attributes: conditions: JSON values; everything but the prompt that a response depends on. A greedy
                response does not depend on ``seed``, and serves for all seeds.
    """

    log: ResponseLog
    benchmark: str
    conditions: Mapping[str, Any]

    def get(self, problem: str, prompt: Sequence[int], greedy: bool, count: int) -> list[Written | None]:
        key = self._key(problem, prompt, greedy)
        return [self.log.read(key, GREEDY if greedy else number) for number in range(count)]

    def put(self, responses: Sequence[Entry]) -> None:
        lines = []
        for problem, prompt, greedy, number, response in responses:
            key, sample = self._key(problem, prompt, greedy), GREEDY if greedy else number
            if self.log.read(key, sample) is None:
                where = {"key": key, "sample": sample, "benchmark": self.benchmark, "id": problem}
                lines.append(where | asdict(response))
        self.log.write(lines)

    def _key(self, problem: str, prompt: Sequence[int], greedy: bool) -> str:
        conditions = {name: v for name, v in self.conditions.items() if not (greedy and name == "seed")}
        everything = [conditions, self.benchmark, problem, list(prompt)]
        return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()[:32]


def fingerprint(folder: Path) -> str:
    """A hash of a model folder's content: the same for a copy, another after any edit.

    Files are read whole, in pieces by several threads, which takes about as long as loading them.
    """
    files = sorted(path for path in folder.iterdir() if path.is_file())
    sizes = [path.stat().st_size for path in files]
    pieces = [(p, start) for p, size in zip(files, sizes, strict=True) for start in range(0, size, _PIECE)]
    names = [f"{path.name} {size}" for path, size in zip(files, sizes, strict=True)]
    with ThreadPoolExecutor() as pool:
        return hashlib.sha256("\n".join([*names, *pool.map(_digest, pieces)]).encode()).hexdigest()


def _digest(piece: tuple[Path, int]) -> str:
    path, start = piece
    with path.open("rb") as file:
        file.seek(start)
        return hashlib.sha256(file.read(_PIECE)).hexdigest()


def problems_digest(problems: Sequence[Problem]) -> str:
    """A hash of these problems, their order and their answers."""
    everything = json.dumps([asdict(problem) for problem in problems], sort_keys=True)
    return hashlib.sha256(everything.encode()).hexdigest()


_PIECE = 1 << 23
