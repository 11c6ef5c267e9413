"""Problems as questions to a generator, and its responses, recalled where they are recorded."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from nemo_grpo.evaluate.responses import Entry, Recall
from nemo_grpo.progress import TokenMeter
from nemo_grpo.sampling.episodes import Written, sample_responses
from nemo_grpo.sampling.images import Images, image_digest
from nemo_grpo.sampling.requests import Request, Sampler, SamplingParams
from nemo_grpo.tasks import Problem, Prompt, Task, encode_prompt
from nemo_grpo.tasks.environment import MultiTurnTask


class Question(NamedTuple):
    """A problem as it is asked. ``id`` names images by their content."""

    id: str
    tokens: list[int]
    images: Images


def question(tokenizer: Any, prompt: Prompt, problem: Problem, has_images: bool) -> Question:
    """The problem as this prompt asks it."""
    tokens = encode_prompt(tokenizer, prompt, problem, with_images=has_images)
    images: Images = tuple(problem.metadata["images"]) if has_images else ()
    return Question(" ".join([problem.id, *map(image_digest, images)]), tokens, images)


def calls(questions: Sequence[Question], size: int, seed: int) -> Iterator[tuple[list[int], int]]:
    """Indices of the problems of each call, and its seed.

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
class Ask:
    """Responses to problems, recalled if recorded, else recorded as they come."""

    generator: Sampler
    tokenizer: Any
    task: Task
    recall: Recall | None = None
    meter: TokenMeter | None = None

    def __call__(
        self, asked: Sequence[Question], count: int, sampling: SamplingParams, seed: int
    ) -> list[list[Written]]:
        """Args: asked: all different in prompt or images.  Returns: ``count`` responses to each."""
        found = [self._known(question, count, sampling.greedy) for question in asked]
        if self.meter is not None:
            self.meter.recalled(sum(response is not None for responses in found for response in responses))
        missing = [place for place, responses in enumerate(found) if None in responses]
        if missing:
            fresh = self._sample([asked[p] for p in missing], [found[p] for p in missing], sampling, seed)
            for place, responses in zip(missing, fresh, strict=True):
                found[place] = [*responses]
        return [[response for response in responses if response is not None] for responses in found]

    def _known(self, question: Question, count: int, greedy: bool) -> list[Written | None]:
        unknown: list[Written | None] = [None] * count
        if self.recall is None:
            return unknown
        found = self.recall.get(question.id, question.tokens, greedy, count)
        # Responses in turns are told apart from others that begin alike by counting: all of a prompt or none.
        return unknown if None in found and isinstance(self.task, MultiTurnTask) else found

    def _sample(
        self, asked: list[Question], found: list[list[Written | None]], sampling: SamplingParams, seed: int
    ) -> list[list[Written]]:
        """What is not found, beside what is."""
        count, flat = len(found[0]), [response for responses in found for response in responses]
        known = {row: response for row, response in enumerate(flat) if response is not None}
        images = [question.images for question in asked] if any(q.images for q in asked) else ()
        prompts = [question.tokens for question in asked]
        request = Request(prompts, count, sampling, seed, images=images, known=frozenset(known))

        def entry(row: int, response: Written) -> Entry:
            one = asked[row // count]
            return Entry(one.id, one.tokens, sampling.greedy, row % count, response)

        def heard(num_tokens: int, ended: Sequence[tuple[int, Written]]) -> None:
            if self.meter is not None:
                self.meter(num_tokens, len(ended))
            if self.recall is not None and ended:
                self.recall.put([entry(*one) for one in ended])

        sampled = sample_responses(self.generator, self.tokenizer, self.task, request, heard)
        fresh = [Written(r.text, int(r.token_mask.sum()), r.truncated) for r in sampled]
        whole = [known.get(row, response) for row, response in enumerate(fresh)]
        return [whole[start : start + count] for start in range(0, len(whole), count)]
