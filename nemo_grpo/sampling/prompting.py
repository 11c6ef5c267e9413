"""Problems as prompts that the policy can go on from."""

from collections.abc import Sequence
from typing import Any

from nemo_grpo.support.errors import UserError
from nemo_grpo.tasks import Problem, Prompt
from nemo_grpo.tasks.prompts import check_vocabulary, encode_many

PROMPTS_CHECKED = 64
"""Encoded at a time before a run starts; of an endless stream of problems no more."""


def encode_prompts(
    problems: Sequence[Problem],
    tokenizer: Any,
    prompt: Prompt,
    *,
    limit: int,
    max_new_tokens: int,
    vocab_size: int,
) -> list[list[int]]:
    """Token ids of each prompt.

    Args:   limit: longest sequence, prompt and response.  vocab_size: the policy's.
    Raises: UserError: a prompt leaves no room for a response, or the tokenizer is another model's; names the
            problem.
    """
    prompts = encode_many(tokenizer, prompt, problems)
    for tokens, problem in zip(prompts, problems, strict=True):
        check_vocabulary(tokens, problem, vocab_size)
        needed = len(tokens) + max_new_tokens
        if needed > limit:
            raise UserError(
                f"policy.max_total_sequence_length={limit}: problem {problem.id!r} has a prompt of "
                f"{len(tokens)} tokens, which with max_new_tokens={max_new_tokens} need {needed}; raise it, "
                "or leave the problem out"
            )
    return prompts
