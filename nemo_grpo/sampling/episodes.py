"""Sampling of whole responses: in one go, or in turns with the task's environment."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from nemo_grpo.sampling.requests import Request, Rollout, Sampler, Turn
from nemo_grpo.support.distributed import from_first_rank
from nemo_grpo.tasks import Task
from nemo_grpo.tasks.base import Episode, MultiTurnTask, Observed, tags_of
from nemo_grpo.tasks.special_tokens import reserved_texts, special_tags

TAIL_TOKENS = 32
"""Last tokens of a turn in which a stop text is looked for."""


@dataclass(frozen=True)
class Response:
    """One whole response, or its turns so far; tensors are [T].

    Attributes:
        tokens: of the policy and of the environment, in order.
        logprobs: the sampler's, nats; 0 for the environment's tokens.
        token_mask: bool; True where the policy chose the token.
        truncated: the length limit ended it.
        text: turns and observations as they were written and read.
        episode: None for a task without turns.
    """

    tokens: Tensor
    logprobs: Tensor
    token_mask: Tensor
    truncated: bool
    text: str
    episode: Episode | None = None

    def plus(self, tokens: Tensor, logprobs: Tensor, text: str, *, by_policy: bool) -> Self:
        """Append what the policy or the environment says next."""
        return replace(
            self,
            tokens=torch.cat([self.tokens, tokens]),
            logprobs=torch.cat([self.logprobs, logprobs]),
            token_mask=torch.cat([self.token_mask, torch.full_like(tokens, by_policy, dtype=torch.bool)]),
            text=self.text + text,
        )


TextReader = Callable[[Sequence[list[int]]], list[str]]


def sample_responses(
    generator: Sampler, tokenizer: Any, task: Task, request: Request, first_words: str = ""
) -> list[Response]:
    """Sample whole responses, those to one prompt together; each text begins with ``first_words``.

    For a `MultiTurnTask`, ``max_new_tokens`` limits the whole response, observations included. An
    observation that leaves no room for another token is not given, and its response counts as truncated.
    The same arguments give the same responses wherever the task's tool answers alike.
    """
    if isinstance(task, MultiTurnTask):
        return _converse(generator, tokenizer, task, request, first_words)
    read = text_reader(tokenizer, task)
    rollout = generator.generate(request)
    return [
        Response(tokens, logprobs, torch.ones_like(tokens, dtype=torch.bool), truncated, first_words + text)
        for tokens, logprobs, truncated, text in _responses(rollout, read)
    ]


def text_reader(tokenizer: Any, task: Task) -> TextReader:
    """Make a reader of responses [B] as the task scores them: without special tokens, except its tags.

    A tokenizer may have ``<think>`` as a special token, and the reward looks for it.
    """
    kept = special_tags(tokenizer, tags_of(task))
    if not kept:
        return partial(tokenizer.batch_decode, skip_special_tokens=True)
    added = tokenizer.added_tokens_decoder.items()
    dropped = {number for number, token in added if token.special and token.content not in kept}

    def read(rows: Sequence[list[int]]) -> list[str]:
        left = [[token for token in row if token not in dropped] for row in rows]
        return list(tokenizer.batch_decode(left, skip_special_tokens=False))

    return read


def _responses(rollout: Rollout, read: TextReader) -> list[tuple[Tensor, Tensor, bool, str]]:
    """Return (tokens, logprobs, truncated, text) of each row."""
    lengths = rollout.lengths.tolist()
    tokens = [row[:n] for row, n in zip(rollout.tokens, lengths, strict=True)]
    logprobs = [row[:n] for row, n in zip(rollout.logprobs, lengths, strict=True)]
    texts = read([row.tolist() for row in tokens])
    return list(zip(tokens, logprobs, rollout.truncated.tolist(), texts, strict=True))


def _converse(
    generator: Sampler, tokenizer: Any, task: MultiTurnTask, request: Request, first_words: str
) -> list[Response]:
    """Sample turn by turn; every call samples the next turn of all responses that are not over."""
    if (meter := request.meter) is not None:  # a turn that ends is no response that ends
        request = replace(request, meter=lambda num_tokens, _num_ended: meter(num_tokens, 0))
    end, limit = StopTexts(task.stop_texts, tokenizer), request.sampling.max_new_tokens
    reserved, read = reserved_texts(tokenizer), text_reader(tokenizer, task)

    def observe(episodes: Sequence[Episode], turns: Sequence[str]) -> Sequence[Observed]:
        return task.observe(episodes, turns, reserved)

    prompts = [prompt for prompt in request.prompts for _ in range(request.num_generations)]
    none = torch.empty(0, dtype=torch.int64)
    responses = [Response(none, none.float(), none.bool(), False, first_words, Episode())] * len(prompts)
    # In the first turn the responses to one prompt share its reading; later on all have their own context.
    going, asked = [*range(len(prompts))], replace(request, turn=Turn(request.limits, end))
    while going:
        turns = _responses(generator.generate(asked), read)
        num_before, going = len(going), _listen(responses, going, turns, limit, tokenizer, observe)
        if meter is not None:
            meter(0, num_before - len(going))
        if going:
            contexts = [prompts[row] + responses[row].tokens.tolist() for row in going]
            turn = Turn([limit - len(responses[row].tokens) for row in going], end)
            asked = replace(request, prompts=contexts, num_generations=1, turn=turn)
    return responses


def _listen(
    responses: list[Response],
    rows: Sequence[int],
    sampled: Sequence[tuple[Tensor, Tensor, bool, str]],
    limit: int,
    tokenizer: Any,
    observe: Callable[..., Sequence[Observed]],
) -> list[int]:
    """Append the rows' turns and the environment's observations; returns the rows that go on."""
    finished, turns = [], []
    for row, (tokens, logprobs, truncated, text) in zip(rows, sampled, strict=True):
        first_words = "" if len(responses[row].tokens) else responses[row].text
        said = responses[row].plus(tokens, logprobs, text, by_policy=True)
        responses[row] = replace(said, truncated=truncated)
        if not truncated:
            finished.append(row)
            turns.append(first_words + text)
    if not finished:
        return []
    episodes = [responses[row].episode for row in finished]
    observed = from_first_rank(lambda: observe(episodes, turns))
    going = []
    for row, answer in zip(finished, observed, strict=True):
        responses[row] = replace(responses[row], episode=answer.episode)
        if answer.observation is None:
            continue
        ids = tokenizer(answer.observation, add_special_tokens=False)["input_ids"]
        if len(ids) < limit - len(responses[row].tokens):
            tokens = torch.tensor(ids, dtype=torch.int64)
            unscored = torch.zeros(len(ids))
            responses[row] = responses[row].plus(tokens, unscored, answer.observation, by_policy=False)
            going.append(row)
        else:
            responses[row] = replace(responses[row], truncated=True)
    return going


class StopTexts:
    """A `TurnEnd` for texts that a tokenizer may spell with several tokens.

    Only a token that holds a text's last character can complete it, so most tokens cost one look-up.
    """

    num_tokens = TAIL_TOKENS

    def __init__(self, texts: tuple[str, ...], tokenizer: Any) -> None:
        self.texts, self._tokenizer = texts, tokenizer
        self._last_characters = {text[-1] for text in texts}
        self._candidates: dict[int, bool] = {}

    def reached(self, tokens: Sequence[int]) -> bool:
        if not self._is_candidate(tokens[-1]):
            return False
        tail = self._tokenizer.decode(tokens[-self.num_tokens :], skip_special_tokens=False)
        return any(text in tail for text in self.texts)

    def _is_candidate(self, token: int) -> bool:
        if token not in self._candidates:
            piece = self._tokenizer.decode([token], skip_special_tokens=False)
            self._candidates[token] = not self._last_characters.isdisjoint(piece)
        return self._candidates[token]
