"""Sampling of whole responses: in one go, or in turns with the task's environment."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Self

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
        tokens: tokens of the policy and of the environment, in order.
        logprobs: the sampler's logprobs in nats; 0 for the environment's tokens.
        token_mask: bool; True where the policy chose the token.
        truncated: True if the length limit ended the response.
        text: the policy's turns and the environment's observations, in order.
        episode: state of the task's episode; None for a task without turns.
    """

    tokens: Tensor
    logprobs: Tensor
    token_mask: Tensor
    truncated: bool
    text: str
    episode: Episode | None = None

    def plus(self, tokens: Tensor, logprobs: Tensor, text: str, *, by_policy: bool) -> Self:
        """Append the next text of the policy or of the environment."""
        mask = torch.full_like(tokens, by_policy, dtype=torch.bool)
        return replace(
            self,
            tokens=torch.cat([self.tokens, tokens]),
            logprobs=torch.cat([self.logprobs, logprobs]),
            token_mask=torch.cat([self.token_mask, mask]),
            text=self.text + text,
        )


TextReader = Callable[[Sequence[list[int]]], list[str]]


def sample_responses(
    generator: Sampler, tokenizer: Any, task: Task, request: Request, first_words: str = ""
) -> list[Response]:
    """Sample whole responses; those to one prompt are adjacent. Each text begins with ``first_words``.

    For a `MultiTurnTask`, ``max_new_tokens`` limits the whole response, observations included. If an
    observation leaves no room for another token, it is not given, and the response counts as truncated.
    The same arguments give the same responses, provided that the task's tool gives the same answers.
    """
    if isinstance(task, MultiTurnTask):
        return _converse(generator, tokenizer, task, request, first_words)
    read = text_reader(tokenizer, task)
    rollout = generator.generate(request)
    return [
        Response(
            tokens=turn.tokens,
            logprobs=turn.logprobs,
            token_mask=torch.ones_like(turn.tokens, dtype=torch.bool),
            truncated=turn.truncated,
            text=first_words + turn.text,
        )
        for turn in _sampled_turns(rollout, read)
    ]


def text_reader(tokenizer: Any, task: Task) -> TextReader:
    """Make a function that decodes responses for scoring.

    It drops special tokens, except those that are tags of the task: a tokenizer may have ``<think>`` as a
    special token, and the reward looks for it in the text.
    """
    tags = special_tags(tokenizer, tags_of(task))
    if not tags:
        return partial(tokenizer.batch_decode, skip_special_tokens=True)
    # A tokenizer can only skip all of its special tokens or none, so they are removed here before decoding.
    added = tokenizer.added_tokens_decoder.items()
    skipped_ids = {number for number, token in added if token.special and token.content not in tags}

    def read(rows: Sequence[list[int]]) -> list[str]:
        visible = [[token for token in row if token not in skipped_ids] for row in rows]
        return list(tokenizer.batch_decode(visible, skip_special_tokens=False))

    return read


class _SampledTurn(NamedTuple):
    """One turn of a response, or a whole one: tokens and logprobs [T], and its text."""

    tokens: Tensor
    logprobs: Tensor
    truncated: bool
    text: str


def _sampled_turns(rollout: Rollout, read: TextReader) -> list[_SampledTurn]:
    """Cut a rollout into its rows, without padding."""
    lengths = rollout.lengths.tolist()
    tokens = [row[:length] for row, length in zip(rollout.tokens, lengths, strict=True)]
    logprobs = [row[:length] for row, length in zip(rollout.logprobs, lengths, strict=True)]
    texts = read([row.tolist() for row in tokens])
    rows = zip(tokens, logprobs, rollout.truncated.tolist(), texts, strict=True)
    return [_SampledTurn(*row) for row in rows]


def _converse(
    generator: Sampler, tokenizer: Any, task: MultiTurnTask, request: Request, first_words: str
) -> list[Response]:
    """Sample responses turn by turn. Each call of the generator samples the next turn of all open ones."""
    meter = request.meter
    if meter is not None:
        # The generator counts every finished turn as a finished response. So its meter passes on tokens only,
        # and the loop below counts the responses.
        request = replace(request, meter=lambda num_tokens, _num_ended: meter(num_tokens, 0))
    end = StopTexts(task.stop_texts, tokenizer)
    limit = request.sampling.max_new_tokens
    reserved = reserved_texts(tokenizer)
    read = text_reader(tokenizer, task)

    def observe(episodes: Sequence[Episode], turns: Sequence[str]) -> Sequence[Observed]:
        return task.observe(episodes, turns, reserved)

    prompts = [prompt for prompt in request.prompts for _ in range(request.num_generations)]
    nothing = torch.empty(0, dtype=torch.int64)
    start = Response(nothing, nothing.float(), nothing.bool(), False, first_words, Episode())
    responses = [start] * len(prompts)
    unfinished = list(range(len(prompts)))
    # In the first turn a prompt is read once for all of its responses. Later every response has its own
    # context.
    turn_request = replace(request, turn=Turn(request.limits, end))
    while unfinished:
        turns = _sampled_turns(generator.generate(turn_request), read)
        num_before = len(unfinished)
        finished_turns = _append_turns(responses, unfinished, turns)
        unfinished = _append_observations(responses, finished_turns, limit, tokenizer, observe)
        if meter is not None:
            meter(0, num_before - len(unfinished))
        if unfinished:
            contexts = [prompts[row] + responses[row].tokens.tolist() for row in unfinished]
            turn = Turn([limit - len(responses[row].tokens) for row in unfinished], end)
            turn_request = replace(request, prompts=contexts, num_generations=1, turn=turn)
    return responses


def _append_turns(
    responses: list[Response], rows: Sequence[int], turns: Sequence[_SampledTurn]
) -> dict[int, str]:
    """Append a turn to the response of each row.

    Returns:
        Row -> text of its turn, without truncated turns.
    """
    finished_turns: dict[int, str] = {}
    for row, turn in zip(rows, turns, strict=True):
        response = responses[row]
        # The first turn begins with the response's prefix, which the policy did not write.
        opening = response.text if len(response.tokens) == 0 else ""
        extended = response.plus(turn.tokens, turn.logprobs, turn.text, by_policy=True)
        responses[row] = replace(extended, truncated=turn.truncated)
        if not turn.truncated:
            finished_turns[row] = opening + turn.text
    return finished_turns


def _append_observations(
    responses: list[Response],
    finished_turns: Mapping[int, str],
    limit: int,
    tokenizer: Any,
    observe: Callable[[Sequence[Episode], Sequence[str]], Sequence[Observed]],
) -> list[int]:
    """Append the environment's observations to responses; returns the rows of those that are not over."""
    if not finished_turns:
        return []
    turns = list(finished_turns.values())
    episodes = [_episode_of(responses[row]) for row in finished_turns]
    # One rank asks the environment for all ranks, because a service may answer differently each time.
    observed_turns = from_first_rank(lambda: observe(episodes, turns))
    unfinished = []
    for row, observed in zip(finished_turns, observed_turns, strict=True):
        response = replace(responses[row], episode=observed.episode)
        if observed.observation is not None:
            ids = tokenizer(observed.observation, add_special_tokens=False)["input_ids"]
            # An observation must leave room for one more token of the policy.
            if len(ids) < limit - len(response.tokens):
                tokens = torch.tensor(ids, dtype=torch.int64)
                logprobs = torch.zeros(len(ids))  # the policy did not choose these tokens
                response = response.plus(tokens, logprobs, observed.observation, by_policy=False)
                unfinished.append(row)
            else:
                response = replace(response, truncated=True)
        responses[row] = response
    return unfinished


def _episode_of(response: Response) -> Episode:
    assert response.episode is not None
    return response.episode


class StopTexts:
    """A `TurnEnd` for texts that a tokenizer may spell with several tokens.

    Only a token that holds a text's last character can complete it, so most tokens cost one look-up.
    """

    num_tokens = TAIL_TOKENS

    def __init__(self, texts: tuple[str, ...], tokenizer: Any) -> None:
        self.texts = texts
        self._tokenizer = tokenizer
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
