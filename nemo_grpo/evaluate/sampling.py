"""Responses to problems: sampled, or reused from the cache."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from nemo_grpo.evaluate.response_cache import Completion, ResponseCache
from nemo_grpo.sampling.episodes import sample_responses
from nemo_grpo.sampling.images import Images, image_digest
from nemo_grpo.sampling.requests import Request, Sampler, SamplingParams
from nemo_grpo.support.progress import TokenMeter
from nemo_grpo.tasks import Problem, Prompt, Task, encode_prompt


class EvalRequest(NamedTuple):
    """A problem's encoded prompt. ``id`` contains a digest of each image."""

    id: str
    tokens: list[int]
    images: Images


def eval_request(tokenizer: Any, prompt: Prompt, problem: Problem, has_images: bool) -> EvalRequest:
    """Encode a problem as this prompt asks it."""
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
