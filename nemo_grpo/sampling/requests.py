"""Requests to a generator, its rollouts, and its protocol."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

import torch
from torch import Tensor

from nemo_grpo.sampling.images import Images
from nemo_grpo.support.errors import UserError

LOWEST_TEMPERATURE = 1e-6
"""Lowest temperature; logits divided by less may overflow."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of a response. Names as in NeMo-RL's ``policy.generation``.

    Attributes:
        max_new_tokens: a response without a stop token is cut here and counts as truncated.
        temperature: at least `LOWEST_TEMPERATURE`; logits are divided by it.
        top_p: in (0, 1]; the smallest set of most likely tokens with at least this mass. 1: all.
        top_k: that many most likely tokens, before top_p. None: all.
        stop_token_ids: any of them ends the response and belongs to it; empty: every response is cut.
        greedy: take the most likely token; temperature, top_p and top_k are ignored.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    greedy: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens must be at least 1; got {self.max_new_tokens}")
        if not LOWEST_TEMPERATURE <= self.temperature < math.inf:
            raise UserError(
                f"temperature must be at least {LOWEST_TEMPERATURE:g} and finite; got {self.temperature}; "
                "for the most likely tokens alone sample greedily (--temperature 0)"
            )
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must be in (0, 1]; got {self.top_p}")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k must be at least 1, or null for no limit; got {self.top_k}")

    @property
    def filters(self) -> bool:
        """True if sampling leaves tokens out."""
        return not self.greedy and (self.top_p < 1 or self.top_k is not None)


@dataclass(frozen=True)
class Rollout:
    """Responses; row i belongs to prompt i // num_generations.

    B = prompts x num_generations, T = longest response.

    Attributes:
        tokens: [B, T] int64; a stop token belongs to its response; 0 after the end.
        logprobs: [B, T] float32, nats, of the sampled token under softmax(logits / temperature), the whole
            vocabulary; temperature 1 if greedy; exactly 0 after the end. The trainer's
            ``generation_logprobs``: training divides the logits by the same temperature, so that the ratio is
            1 where weights agree.
        lengths: [B] int64, response tokens, at least 1.
        truncated: [B] bool; the response met max_new_tokens before a stop token.
    """

    tokens: Tensor
    logprobs: Tensor
    lengths: Tensor
    truncated: Tensor


class TurnEnd(Protocol):
    """Tells whether a turn of a response is complete, beside its stop tokens."""

    @property
    def texts(self) -> tuple[str, ...]:
        """A turn ends with the token that completes one of these; the token belongs to the turn."""
        ...

    @property
    def num_tokens(self) -> int:
        """Number of a turn's last tokens that decide whether it is complete."""
        ...

    def reached(self, tokens: Sequence[int]) -> bool:
        """Return True if the last of a turn's tokens completes one of the texts.

        Args:
            tokens: the last ``num_tokens`` of the turn or more, or all of them if it has fewer.
        """
        ...


@dataclass(frozen=True)
class Turn:
    """Limits of one turn of each response, if responses are sampled in turns.

    Attributes:
        max_new_tokens: tokens that are left to the response, one number per prompt; between 1 and the
            sampling's limit.
        end: tells where a turn ends before the response does.
    """

    max_new_tokens: list[int]
    end: TurnEnd


@dataclass(frozen=True)
class Request:
    """Everything that responses depend on, besides the weights.

    Attributes:
        prompts: token ids, none empty.
        num_generations: responses to each prompt.
        sampling: how tokens are drawn.
        seed: of the random numbers.
        turn: sample one turn of each response; None: whole responses.
        images: of each prompt, in the order of the placeholders in it; empty: no prompt has any.
        meter: called while sampling with the numbers of tokens drawn, and of responses ended, since the last
            call.
    """

    prompts: Sequence[list[int]]
    num_generations: int
    sampling: SamplingParams
    seed: int
    turn: Turn | None = None
    images: Sequence[Images] = ()
    meter: Callable[[int, int], None] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        assert self.prompts
        assert all(self.prompts)
        assert self.num_generations >= 1, self.num_generations
        assert len(self.images) in (0, len(self.prompts)), (len(self.images), len(self.prompts))
        assert len(self.limits) == len(self.prompts), (len(self.limits), len(self.prompts))

    @property
    def limits(self) -> list[int]:
        """Largest number of new tokens in each prompt's responses."""
        if self.turn is not None:
            return self.turn.max_new_tokens
        return [self.sampling.max_new_tokens] * len(self.prompts)

    @property
    def lengths(self) -> Tensor:
        """Lengths of the rows' prompts, [B] int64."""
        return torch.tensor([len(prompt) for prompt in self.prompts]).repeat_interleave(self.num_generations)

    @property
    def occurrences(self) -> list[int]:
        """For each prompt, the number of equal ones, with the same images, before it."""
        counts: Counter[tuple[object, ...]] = Counter()
        num_before = []
        images = self.images or [()] * len(self.prompts)
        for prompt in zip(map(tuple, self.prompts), images, strict=True):
            num_before.append(counts[prompt])
            counts[prompt] += 1
        return num_before

    def select(self, indices: Sequence[int]) -> Self:
        """Return the request for some of the prompts."""
        turn = None
        if self.turn is not None:
            turn = replace(self.turn, max_new_tokens=[self.limits[index] for index in indices])
        images = [self.images[index] for index in indices] if self.images else ()
        prompts = [self.prompts[index] for index in indices]
        return replace(self, prompts=prompts, turn=turn, images=images)

    def check_context(self, context: float, name: str, remedy: str = "lower one of them") -> None:
        """Refuse a prompt that with its response exceeds a limit.

        Args:
            context: limit in tokens.
            name: of the limit.
            remedy: end of the message.
        """
        sizes = [(len(prompt), limit) for prompt, limit in zip(self.prompts, self.limits, strict=True)]
        longest_prompt, longest_response = max(sizes, key=sum)
        check_fits(longest_prompt, longest_response, context, name, remedy)


def check_fits(prompt: int, response: int, context: float, name: str, remedy: str) -> None:
    """Refuse a prompt and a response of these numbers of tokens if they exceed ``context``."""
    if prompt + response > context:
        raise UserError(
            f"prompt and response must fit into {name}={context}; the longest prompt has {prompt} tokens "
            f"and max_new_tokens={response}: {remedy}"
        )


class Sampler(Protocol):
    """Samples responses."""

    def generate(self, request: Request) -> Rollout:
        """Sample responses, or with ``request.turn`` one turn of each.

        A response depends only on the weights, its prompt, the request's sampling and seed (up to float
        noise), not on the other prompts, their order, the batch size or any global random state. The same
        prompt twice in a request gives independent responses.
        """
        ...


class Generator(Sampler, Protocol):
    """Samples responses from weights that it is given."""

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take these weights, named as in the model's Hugging Face checkpoint, for all later calls.

        Raises:
            ValueError: a weight is missing, unknown, or of another shape. Nothing can be generated until a
                complete set has come.
        """
        ...
