"""Samples responses to problems, and reuses those recorded on disk."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from nemo_grpo.sampling.episodes import sample_responses
from nemo_grpo.sampling.images import Images, image_digest
from nemo_grpo.sampling.requests import Request, Sampler, SamplingParams
from nemo_grpo.support.errors import UserError
from nemo_grpo.support.files import hold_lock
from nemo_grpo.support.progress import TokenMeter
from nemo_grpo.tasks import Problem, Prompt, Task, encode_prompt

GREEDY = "greedy"
"""Sample number of a greedy response."""


class Completion(NamedTuple):
    """Text of a response.  Attributes: num_tokens: the policy's, stop token included."""

    text: str
    num_tokens: int
    truncated: bool


class ResponseLog:
    """Responses in a JSONL file, a line each; new ones are appended and are on disk when `write` returns.

    A line's ``key`` hashes everything that the response depends on, so that a changed model, prompt or
    setting finds no match and keeps the old lines. A last line that a kill truncated is dropped. The file is
    locked: one process at a time.
    """

    def __init__(self, path: Path) -> None:
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
        """Return the response of this key and number, if recorded."""
        return self._known.get((key, sample))

    def write(self, lines: Sequence[dict[str, Any]]) -> None:
        """Append records with ``key``, ``sample`` and the fields of `Completion`, in one write."""
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
    """Recorded responses of one benchmark under one set of conditions.

    Attributes: conditions: JSON values; all that a response depends on besides its prompt. A greedy response
                does not depend on ``seed`` and serves all seeds.
    """

    log: ResponseLog
    benchmark: str
    conditions: Mapping[str, Any]

    def get(
        self, problem: str, prompt: Sequence[int], count: int, *, greedy: bool
    ) -> list[Completion] | None:
        """Return the ``count`` responses to a problem's prompt; None unless all of them are recorded."""
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


class EvalRequest(NamedTuple):
    """A problem's encoded prompt. ``id`` contains a digest of each image."""

    id: str
    tokens: list[int]
    images: Images


def eval_request(tokenizer: Any, prompt: Prompt, problem: Problem, has_images: bool) -> EvalRequest:
    """Encode a problem with its prompt."""
    tokens = encode_prompt(tokenizer, prompt, problem, with_images=has_images)
    images: Images = tuple(problem.metadata["images"]) if has_images else ()
    return EvalRequest(" ".join([problem.id, *map(image_digest, images)]), tokens, images)


def calls(questions: Sequence[EvalRequest], size: int, seed: int) -> Iterator[tuple[list[int], int]]:
    """Yield the indices of each call's problems, and its seed.

    Each repetition of a prompt gets a separate call and seed, so that its responses do not depend on how the
    calls are split.
    """
    seen: Counter[tuple[object, ...]] = Counter()
    rounds: dict[int, list[int]] = {}
    for index, question in enumerate(questions):
        asked = (tuple(question.tokens), question.images)
        rounds.setdefault(seen[asked], []).append(index)
        seen[asked] += 1
    for number, indices in rounds.items():
        for start in range(0, len(indices), size):
            yield indices[start : start + size], seed + _ROUND * number


_ROUND = 1_000_003


@dataclass(frozen=True)
class CachedSampler:
    """Responses to problems: from the cache, else sampled and recorded, one call at a time."""

    generator: Sampler
    tokenizer: Any
    task: Task
    cache: ResponseCache | None = None
    meter: TokenMeter | None = None
    first_words: str = ""

    def __call__(
        self, asked: Sequence[EvalRequest], count: int, sampling: SamplingParams, seed: int
    ) -> list[list[Completion]]:
        """Return ``count`` responses to each request.  Args: asked: all different in prompt or images."""
        found = {
            place: known
            for place, one in enumerate(asked)
            if self.cache and (known := self.cache.get(one.id, one.tokens, count, greedy=sampling.greedy))
        }
        if self.meter is not None:
            self.meter.recalled(count * len(found))
        missing = [place for place in range(len(asked)) if place not in found]
        if missing:
            fresh = self._sample([asked[place] for place in missing], count, sampling, seed)
            found |= dict(zip(missing, fresh, strict=True))
            if self.cache is not None:
                answered = ((asked[place].id, asked[place].tokens, found[place]) for place in missing)
                self.cache.put(answered, greedy=sampling.greedy)
        return [found[place] for place in range(len(asked))]

    def _sample(
        self, asked: Sequence[EvalRequest], count: int, sampling: SamplingParams, seed: int
    ) -> list[list[Completion]]:
        images = [one.images for one in asked] if any(one.images for one in asked) else ()
        prompts = [one.tokens for one in asked]
        request = Request(prompts, count, sampling, seed, images=images, meter=self.meter)
        sampled = sample_responses(self.generator, self.tokenizer, self.task, request, self.first_words)
        read = [Completion(r.text, int(r.token_mask.sum()), r.truncated) for r in sampled]
        return [read[start : start + count] for start in range(0, len(read), count)]
