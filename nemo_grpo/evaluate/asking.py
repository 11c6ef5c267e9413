"""Problems as questions to a generator, and its responses, recalled where they are recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from nemo_grpo.evaluate.responses import Recall, Recorded
from nemo_grpo.sampling.episodes import sample_responses
from nemo_grpo.sampling.images import Images, image_digest
from nemo_grpo.sampling.requests import Generator, Request, SamplingParams
from nemo_grpo.tasks import Problem, Prompt, Task, encode_prompt


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
    """Responses to problems, recalled if recorded."""

    generator: Generator
    tokenizer: Any
    task: Task
    recall: Recall | None

    def __call__(
        self, asked: Sequence[Question], count: int, sampling: SamplingParams, seed: int
    ) -> list[list[Recorded]]:
        """Args: asked: all different in prompt or images.  Returns: ``count`` responses to each."""
        known: dict[int, list[Recorded]] = {}
        if self.recall is not None:
            for place, question in enumerate(asked):
                found = self.recall.get(question.id, question.tokens, sampling.greedy, count)
                known |= {} if found is None else {place: found}
        missing = [place for place in range(len(asked)) if place not in known]
        if missing:
            fresh = self._generate([asked[place] for place in missing], count, sampling, seed)
            for place, responses in zip(missing, fresh, strict=True):
                known[place] = responses
                if self.recall is not None:
                    self.recall.put(asked[place].id, asked[place].tokens, sampling.greedy, responses)
        return [known[place] for place in range(len(asked))]

    def _generate(
        self, asked: list[Question], count: int, sampling: SamplingParams, seed: int
    ) -> list[list[Recorded]]:
        images = [question.images for question in asked] if any(q.images for q in asked) else ()
        request = Request([q.tokens for q in asked], count, sampling, seed, images=images)
        sampled = sample_responses(self.generator, self.tokenizer, self.task, request)
        flat = [Recorded(r.text, int(r.token_mask.sum()), r.truncated) for r in sampled]
        return [flat[start : start + count] for start in range(0, len(flat), count)]
