"""Interface of generators: the request, the rollout that answers it, and the protocols to implement."""

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
        max_new_tokens: limit of a response; one without a stop token ends here and counts as truncated.
        temperature: divides the logits; at least `LOWEST_TEMPERATURE`.
        top_p: sample from the smallest set of most likely tokens with at least this mass, in (0, 1]; with 1
            from all tokens.
        top_k: sample from this number of most likely tokens, chosen before top_p; with None from all tokens.
        stop_token_ids: any of these ends the response and belongs to it. If there are none, every response
            is truncated.
        greedy: take the most likely token and ignore temperature, top_p and top_k.
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
        """True if top_k or top_p excludes tokens."""
        return not self.greedy and (self.top_p < 1 or self.top_k is not None)


@dataclass(frozen=True)
class Rollout:
    """Responses; row i belongs to prompt i // num_generations.

    B = prompts x num_generations, T = longest response.

    Attributes:
        tokens: [B, T] int64; a stop token belongs to its response; 0 after the end.
        logprobs: [B, T] float32, nats. Logprob of the sampled token under softmax(logits / temperature) over
            the whole vocabulary, with temperature 1 if greedy; exactly 0 after the end. The trainer calls
            them ``generation_logprobs``. It divides its logits by the same temperature, so that the ratio is
            1 if the weights are equal.
        lengths: [B] int64, number of response tokens, at least 1.
        truncated: [B] bool, True if the response reached max_new_tokens before a stop token.
    """

    tokens: Tensor
    logprobs: Tensor
    lengths: Tensor
    truncated: Tensor


class TurnEnd(Protocol):
    """Tells whether a turn of a response is complete, beside its stop tokens."""

    @property
    def texts(self) -> tuple[str, ...]:
        """Stop texts: a turn ends with the token that completes one of them, which belongs to the turn."""
        ...

    @property
    def num_tokens(self) -> int:
        """Number of a turn's last tokens that decide whether it is complete."""
        ...

    def reached(self, tokens: Sequence[int]) -> bool:
        """Return True if the last token of a turn completes one of the texts.

        Args:
            tokens: end of the turn, at least ``num_tokens`` long; the whole turn if it is shorter.
        """
        ...


@dataclass(frozen=True)
class Turn:
    """Limits of one turn of each response, if responses are sampled in turns.

    Attributes:
        max_new_tokens: for each prompt, the tokens that its response may still get; between 1 and the limit
            of the sampling.
        end: decides whether a turn is over although its response is not.
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
        turn: if set, sample one turn of each response instead of whole responses.
        images: images of each prompt, in the order of their placeholders; empty if no prompt has images.
        meter: called during sampling with the number of tokens sampled and of responses ended since its last
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
        """Length of each row's prompt, [B] int64."""
        return torch.tensor([len(prompt) for prompt in self.prompts]).repeat_interleave(self.num_generations)

    @property
    def occurrences(self) -> list[int]:
        """For each prompt, the number of earlier prompts with the same tokens and images."""
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
            name: name of the limit in the message.
            remedy: end of the message.
        """
        sizes = [(len(prompt), limit) for prompt, limit in zip(self.prompts, self.limits, strict=True)]
        longest_prompt, longest_response = max(sizes, key=sum)
        check_fits(longest_prompt, longest_response, context, name, remedy)


def check_fits(prompt: int, response: int, context: float, name: str, remedy: str) -> None:
    """Refuse lengths of a prompt and a response, in tokens, whose sum exceeds ``context``."""
    if prompt + response > context:
        raise UserError(
            f"prompt and response must fit into {name}={context}; the longest prompt has {prompt} tokens "
            f"and max_new_tokens={response}: {remedy}"
        )


class Sampler(Protocol):
    """Protocol of everything that samples responses; its weights may be fixed."""

    def generate(self, request: Request) -> Rollout:
        """Sample responses, or with ``request.turn`` one turn of each.

        A response depends only on the weights, its prompt, the request's sampling and seed (up to float
        noise), not on the other prompts, their order, the batch size or any global random state. The same
        prompt twice in a request gives independent responses.
        """
        ...


class Generator(Sampler, Protocol):
    """Protocol of a sampler whose weights can be replaced, as training does after each step."""

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take these weights, named as in the model's Hugging Face checkpoint, for all later calls.

        Raises:
            ValueError: a weight is missing, unknown, or has another shape. Then `generate` refuses to sample
                until a complete set of weights has been taken.
        """
        ...
