"""From a problem to prompt tokens: the recipe's system text and template, the tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nemo_grpo.errors import UserError
from nemo_grpo.tasks.base import Problem

SLOT = "{question}"
IMAGES = "vision tasks need the cluster engine (NeMo-RL), whose processor encodes images"


class PromptLike(Protocol):
    """The recipe's ``nemo_grpo.prompt`` section."""

    @property
    def system(self) -> str | None: ...

    @property
    def template(self) -> str: ...

    @property
    def use_chat_template(self) -> bool: ...

    @property
    def response_prefix(self) -> str: ...


@dataclass(frozen=True)
class Prompt:
    """A prompt without a recipe: for tests and for other programs.

    Attributes:
        system: system message, or None for no such message.
        template: user message with a ``{question}`` slot.
        use_chat_template: False: the messages alone, one below the other, for models without a chat template.
        response_prefix: the first words of every response; the model goes on from there.
    """

    system: str | None = None
    template: str = SLOT
    use_chat_template: bool = True
    response_prefix: str = ""


def chat_messages(prompt: PromptLike, problem: Problem) -> list[dict[str, str]]:
    """The conversation that ends with the question.

    Only the slot is replaced; other braces stay, so that templates may hold LaTeX.

    Raises: UserError: the template has no slot.
    """
    if SLOT not in prompt.template:
        raise UserError(f"the prompt template needs {SLOT} where the problem goes; got {prompt.template!r}")
    system = [{"role": "system", "content": prompt.system}] if prompt.system else []
    return [*system, {"role": "user", "content": prompt.template.replace(SLOT, problem.question)}]


def encode_prompt(tokenizer: Any, prompt: PromptLike, problem: Problem) -> list[int]:
    """Token ids up to where the response begins.

    Args:   tokenizer: a Hugging Face tokenizer; with a chat template, if the prompt uses one.
    Raises: UserError: it has none, the template has no slot, or the problem has images.
    """
    if problem.metadata.get("images"):
        raise UserError(
            f"problem {problem.id!r} has images, and these token ids would leave them out: {IMAGES}"
        )
    if not prompt.use_chat_template:
        text = "\n".join(message["content"] for message in chat_messages(prompt, problem))
        return list(tokenizer(text + prompt.response_prefix)["input_ids"])
    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template; use an instruction-tuned "
            "model's, put chat_template.jinja into its folder, or do without: "
            "nemo_grpo.prompt.use_chat_template=false in a recipe, --prompt tr_grpo_math in eval"
        )
    text = tokenizer.apply_chat_template(
        chat_messages(prompt, problem), tokenize=False, add_generation_prompt=True
    )
    return list(tokenizer(text + prompt.response_prefix, add_special_tokens=False)["input_ids"])


def check_vocabulary(prompt: Sequence[int], problem: Problem, vocab_size: int | None) -> None:
    """Refuse a prompt that the model has no embeddings for.

    Args:   vocab_size: the model's; None: it is not known.
    Raises: UserError: the tokenizer is not the model's.
    """
    if vocab_size is not None and max(prompt, default=0) >= vocab_size:
        raise UserError(
            f"problem {problem.id!r}: the tokenizer gives token {max(prompt)}, and the model's vocab_size is "
            f"{vocab_size}; put the model's own tokenizer into its folder"
        )
