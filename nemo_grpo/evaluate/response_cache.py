"""Responses on disk, in front of the generator: what is on record is not sampled again."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from nemo_grpo.support.errors import UserError
from nemo_grpo.support.files import hold_lock

GREEDY = "greedy"
"""The sample number of a greedy response."""


class Completion(NamedTuple):
    """A response as it reads; ``num_tokens``: of the policy, stop token included."""

    text: str
    num_tokens: int
    truncated: bool


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

    def read(self, key: str, sample: int | str) -> Completion | None:
        """The response of this key and number, if it is known."""
        return self._known.get((key, sample))

    def write(self, lines: Sequence[dict[str, Any]]) -> None:
        """Append records with ``key``, ``sample`` and the fields of `Completion`, in one piece."""
        self._file.write("".join(json.dumps(line) + "\n" for line in lines).encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        self._known |= dict(map(_entry, lines))

    def _read(self) -> dict[tuple[str, int | str], Completion]:
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


def _entry(line: Mapping[str, Any]) -> tuple[tuple[str, int | str], Completion]:
    return (line["key"], line["sample"]), Completion(line["text"], line["num_tokens"], line["truncated"])


@dataclass(frozen=True)
class ResponseCache:
    """The responses of one benchmark under one set of conditions.

    Attributes: conditions: JSON values; everything but the prompt that a response depends on. A greedy
                response does not depend on ``seed``, and serves for all seeds.
    """

    log: ResponseLog
    benchmark: str
    conditions: Mapping[str, Any]

    def get(
        self, problem: str, prompt: Sequence[int], count: int, *, greedy: bool
    ) -> list[Completion] | None:
        """The ``count`` responses to a problem's prompt; None unless all of them are known."""
        key = self._key(problem, prompt, greedy)
        found = [self.log.read(key, GREEDY if greedy else number) for number in range(count)]
        known = [response for response in found if response is not None]
        return known if len(known) == count else None

    def put(
        self, answered: Iterable[tuple[str, Sequence[int], Sequence[Completion]]], *, greedy: bool
    ) -> None:
        """Record (problem, prompt, all responses in order) of one call."""
        lines = []
        for problem, prompt, responses in answered:
            where = {"key": self._key(problem, prompt, greedy), "benchmark": self.benchmark, "id": problem}
            for number, response in enumerate(responses):
                sample = GREEDY if greedy else number
                if self.log.read(where["key"], sample) is None:
                    lines.append({**where, "sample": sample, **response._asdict()})
        self.log.write(lines)

    def _key(self, problem: str, prompt: Sequence[int], greedy: bool) -> str:
        conditions = {name: v for name, v in self.conditions.items() if not (greedy and name == "seed")}
        everything = [conditions, self.benchmark, problem, list(prompt)]
        return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()[:32]
