"""Responses to an evaluation's problems: sampled once, recorded in a file, and read from it afterwards."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from nemo_grpo.sampling.episodes import sample_responses
from nemo_grpo.sampling.images import Images, image_digest
from nemo_grpo.sampling.requests import Request, Sampler, SamplingParams
from nemo_grpo.support.errors import UserError
from nemo_grpo.support.files import hold_lock
from nemo_grpo.support.progress import TokenMeter
from nemo_grpo.tasks import Problem, Prompt, Task, encode_prompt
from nemo_grpo.tasks.prompts import first_words


class Completion(NamedTuple):
    """Text of a response.

    Attributes:
        text: text of the response without special tokens.
        num_tokens: number of the policy's tokens, stop token included.
        truncated: True if the length limit ended the response.
    """

    text: str
    num_tokens: int
    truncated: bool


class EvalRequest(NamedTuple):
    """A problem's encoded prompt.

    Attributes:
        id: the problem's id, followed by a digest of each image.
        tokens: tokens of the prompt.
        images: paths of the prompt's images.
    """

    id: str
    tokens: list[int]
    images: Images

    @property
    def prompt_hash(self) -> str:
        """Hash the prompt's tokens."""
        return hashlib.sha256(json.dumps(self.tokens).encode()).hexdigest()[:32]


Place = tuple[str, str, int | None, int]
"""Identity of a recorded response: problem, hash of its prompt, seed (or None for greedy), and number of the
sample."""


class ResponseFile:
    """JSONL file with the responses to one benchmark, one response per line.

    The file's name is a hash of everything that decides the responses, see `Benchmark.response_key`. Recorded
    responses are read instead of sampled again. `put` appends lines, which are on disk when it returns. An
    incomplete last line, which a kill leaves, is dropped. A lock keeps other processes out.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        try:
            hold_lock(self._file, f"{path} is being written by another evaluation; give each its own --out")
            self._recorded = self._read()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._recorded)

    def get(self, request: EvalRequest, count: int, seed: int | None) -> list[Completion] | None:
        """Return the responses to a problem, or None unless all are recorded.

        Args:
            request: encoded prompt of the problem.
            count: number of responses.
            seed: seed of random responses, or None for greedy ones.
        """
        places = [(request.id, request.prompt_hash, seed, number) for number in range(count)]
        recorded = [self._recorded[place] for place in places if place in self._recorded]
        return recorded if len(recorded) == count else None

    def put(self, answered: Iterable[tuple[EvalRequest, Sequence[Completion]]], seed: int | None) -> None:
        """Append the responses that are not recorded yet, in one write.

        Args:
            answered: encoded prompts, each with all of its responses in the order of the samples.
            seed: seed of random responses, or None for greedy ones.
        """
        lines = []
        new_responses: dict[Place, Completion] = {}
        for request, responses in answered:
            for number, response in enumerate(responses):
                place = (request.id, request.prompt_hash, seed, number)
                if place not in self._recorded:
                    identity = dict(zip(("id", "prompt", "seed", "sample"), place, strict=True))
                    lines.append({**identity, **response._asdict()})
                    new_responses[place] = response
        self._file.write("".join(json.dumps(line) + "\n" for line in lines).encode())
        # On disk now, so that a job that is killed later has lost nothing.
        self._file.flush()
        os.fsync(self._file.fileno())
        self._recorded |= new_responses

    def _read(self) -> dict[Place, Completion]:
        """Read all complete lines, and cut off an incomplete last line."""
        self._file.seek(0)
        content = self._file.read()
        complete_lines = content[: content.rfind(b"\n") + 1]
        if len(complete_lines) < len(content):
            self._file.truncate(len(complete_lines))
        recorded = {}
        for number, line in enumerate(complete_lines.splitlines(), 1):
            try:
                place, response = _entry(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{self.path}:{number} is damaged ({error}); remove that line") from error
            recorded[place] = response
        return recorded


def _entry(line: Mapping[str, Any]) -> tuple[Place, Completion]:
    place = (line["id"], line["prompt"], line["seed"], line["sample"])
    return place, Completion(line["text"], line["num_tokens"], line["truncated"])


_ROUND_SEED_STEP = 1_000_003
"""Distance of the seeds of two rounds, see `calls`. It is larger than any range of seeds that somebody
averages over, so that no round shares its seed with another run."""


def calls(requests: Sequence[EvalRequest], size: int, seed: int) -> Iterator[tuple[list[int], int]]:
    """Yield the indices of each call's problems, and its seed.

    Args:
        requests: encoded prompts of all problems.
        size: largest number of problems in a call.
        seed: seed of the evaluation.
    """
    # Each repetition of a prompt gets a separate call and seed, so that its responses do not depend on how
    # the calls are split. A generator tells equal prompts apart only within one call.
    counts: Counter[tuple[object, ...]] = Counter()
    rounds: dict[int, list[int]] = {}
    for index, request in enumerate(requests):
        prompt = (tuple(request.tokens), request.images)
        rounds.setdefault(counts[prompt], []).append(index)
        counts[prompt] += 1
    for number, indices in rounds.items():
        for start in range(0, len(indices), size):
            yield indices[start : start + size], seed + _ROUND_SEED_STEP * number


PROBLEMS_PER_CALL = 64
"""Problems sampled per call; the result does not depend on it."""


@dataclass(frozen=True)
class ResponseSource:
    """Gives responses to a task's problems: recorded ones, and sampled ones where none are recorded.

    Attributes:
        generator: samples with the weights to evaluate.
        tokenizer: a Hugging Face tokenizer.
        task: task of the problems.
        prompt: text that is put around each problem.
        sampling: parameters of random responses; greedy ones share the length limit and the stop tokens.
        seed: seed of random responses.
        meter: counts every token and response.
        recorded: file of responses; the new ones of each call are added when the call ends.
        problems_per_call: problems that are sampled together; a smaller number takes less memory.
    """

    generator: Sampler
    tokenizer: Any
    task: Task
    prompt: Prompt
    sampling: SamplingParams
    seed: int
    meter: TokenMeter | None = None
    recorded: ResponseFile | None = None
    problems_per_call: int = PROBLEMS_PER_CALL

    def request(self, problem: Problem) -> EvalRequest:
        """Encode a problem with its prompt."""
        has_images = self.task.config.needs_images
        tokens = encode_prompt(self.tokenizer, self.prompt, problem, with_images=has_images)
        images: Images = tuple(problem.metadata["images"]) if has_images else ()
        # The id contains the pictures' content, because a file may be replaced under the same name.
        request_id = " ".join([problem.id, *map(image_digest, images)])
        return EvalRequest(request_id, tokens, images)

    def calls(self, requests: Sequence[EvalRequest]) -> Iterator[tuple[list[int], int]]:
        """Yield the indices of each call's problems, and its seed, as `calls` splits them."""
        return calls(requests, self.problems_per_call, self.seed)

    def greedy(self, requests: Sequence[EvalRequest], call_seed: int) -> list[list[Completion]]:
        """Return one greedy response to each request."""
        return self._respond(requests, 1, replace(self.sampling, greedy=True), call_seed)

    def samples(self, requests: Sequence[EvalRequest], count: int, call_seed: int) -> list[list[Completion]]:
        """Return ``count`` random responses to each request."""
        return self._respond(requests, count, self.sampling, call_seed)

    def _respond(
        self, requests: Sequence[EvalRequest], count: int, sampling: SamplingParams, call_seed: int
    ) -> list[list[Completion]]:
        """Return ``count`` responses to each request; the requests all differ in prompt or images."""
        # Greedy responses are recorded without a seed, because they are the same for all seeds.
        seed = None if sampling.greedy else self.seed
        responses: dict[int, list[Completion]] = {}
        if self.recorded is not None:
            for index, request in enumerate(requests):
                recorded = self.recorded.get(request, count, seed)
                if recorded is not None:
                    responses[index] = recorded
        if self.meter is not None:
            self.meter.recalled(count * len(responses))
        unrecorded = [index for index in range(len(requests)) if index not in responses]
        if unrecorded:
            new_requests = [requests[index] for index in unrecorded]
            new_responses = self._sample(new_requests, count, sampling, call_seed)
            responses |= dict(zip(unrecorded, new_responses, strict=True))
            if self.recorded is not None:
                self.recorded.put(zip(new_requests, new_responses, strict=True), seed)
        return [responses[index] for index in range(len(requests))]

    def _sample(
        self, requests: Sequence[EvalRequest], count: int, sampling: SamplingParams, call_seed: int
    ) -> list[list[Completion]]:
        has_images = any(request.images for request in requests)
        images = [request.images for request in requests] if has_images else ()
        prompts = [request.tokens for request in requests]
        batch = Request(prompts, count, sampling, call_seed, images=images, meter=self.meter)
        opening = first_words(self.prompt, self.task.config)
        responses = sample_responses(self.generator, self.tokenizer, self.task, batch, opening)
        completions = [
            # The mask excludes the environment's observations from the count.
            Completion(response.text, int(response.token_mask.sum()), response.truncated)
            for response in responses
        ]
        return [completions[start : start + count] for start in range(0, len(completions), count)]
