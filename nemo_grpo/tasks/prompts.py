"""Prompts of problems: the recipe's system text and template, in the tokenizer's chat template."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from nemo_grpo.support.errors import UserError, did_you_mean, first_line
from nemo_grpo.support.files import read_yaml
from nemo_grpo.tasks.base import Problem

PRESETS: dict[str, dict[str, Any]] = read_yaml(Path(__file__).with_name("presets.yaml"))
"""The papers' prompts by name: fields of `Prompt`."""
SLOT = "{question}"
PROMPTS_CHECKED = 64
"""Prompts encoded at a time before a run starts; of an endless stream only the first ones are encoded."""
IMAGES = "vision tasks need the cluster engine (NeMo-RL), whose processor encodes images"


class Prompt(BaseModel):
    """The recipe's ``nemo_grpo.prompt`` section; it turns problems into texts that the policy continues."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True)

    preset: str | None = None
    """A paper's prompt, such as cw_grpo or tr_grpo_logic; keys set beside it take precedence."""
    system: str | None = None
    """System message of problems that bring none; null: none."""
    template: str = SLOT
    """User message; {question} stands for the problem's text, or its last message."""
    use_chat_template: bool = True
    """False: the messages without a template, one below the other, for base models."""
    response_prefix: str = ""
    """The first words of every response, which the model does not write itself, such as <think>."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_the_preset(cls, section: Any) -> Any:
        name = section.get("preset") if isinstance(section, Mapping) else None
        if not isinstance(name, str):
            return section
        if name not in PRESETS:
            raise UserError(f"nemo_grpo.prompt.preset={name!r} is unknown{did_you_mean(name, PRESETS)}")
        return {**PRESETS[name], **section}

    @field_validator("template")
    @classmethod
    def _template_has_a_slot(cls, template: str) -> str:
        if SLOT not in template:
            raise UserError(
                f"nemo_grpo.prompt.template={template!r} has no slot for the problem; put {SLOT} there"
            )
        return template


def chat_messages(prompt: Prompt, problem: Problem) -> list[dict[str, str]]:
    """Build the conversation that ends with the question.

    A problem's own system message takes the place of the recipe's.
    """
    messages = [dict(message) for message in problem.history]
    if prompt.system and all(message["role"] != "system" for message in messages):
        messages.insert(0, {"role": "system", "content": prompt.system})
    # Not str.format, which would read the braces of LaTeX in a template.
    question = prompt.template.replace(SLOT, problem.question)
    messages.append({"role": "user", "content": question})
    return messages


def first_words(prompt: Prompt, task: Any) -> str:
    """Return the prefix to put before a response when the task scores it.

    This is the prompt's ``response_prefix``. A task with think_is_open adds the open ``<think>`` itself, so
    that the tag is removed here.

    Args:
        prompt: the recipe's prompt.
        task: the task's configuration.
    """
    before, _, after = prompt.response_prefix.rpartition("<think>")
    if getattr(task, "think_is_open", False) and "</think>" not in after:
        return before + after
    return prompt.response_prefix


def check_image_prompt(prompt: Prompt) -> None:
    """Refuse prompt settings that prompts with images do not support."""
    if prompt.response_prefix or not prompt.use_chat_template:
        raise UserError(
            "nemo_grpo.prompt: a task with images uses its processor's chat template and no response_prefix; "
            "leave response_prefix and use_chat_template out"
        )


def image_message(prompt: Prompt, problem: Problem) -> dict[str, Any]:
    """Build the only message of a prompt with images: the images, then the system text and the question."""
    text = "\n\n".join(message["content"] for message in chat_messages(prompt, problem))
    images = [{"type": "image", "image": path} for path in problem.metadata["images"]]
    return {"role": "user", "content": [*images, {"type": "text", "text": text}]}


def encode_prompt(
    tokenizer: Any, prompt: Prompt, problem: Problem, *, with_images: bool = False
) -> list[int]:
    """Encode a prompt up to where the response begins.

    Args:
        tokenizer: a Hugging Face tokenizer; with a chat template, if the prompt uses one.
        prompt: the recipe's.
        problem: the problem.
        with_images: images become the chat template's placeholders; the sampler gets the images.
    """
    text, with_special_tokens = _prompt_text(tokenizer, prompt, problem, with_images=with_images)
    ids = tokenizer(text, add_special_tokens=with_special_tokens)["input_ids"]
    return _open_ended(tokenizer, text, ids)


def encode_many(tokenizer: Any, prompt: Prompt, problems: Sequence[Problem]) -> list[list[int]]:
    """Encode each problem's prompt, with one call of the tokenizer."""
    if not problems:
        return []
    pairs = [_prompt_text(tokenizer, prompt, problem) for problem in problems]
    texts = [text for text, _ in pairs]
    # The prompt decides this, so it is the same for all problems.
    _, with_special_tokens = pairs[0]
    encoded = tokenizer(texts, add_special_tokens=with_special_tokens)["input_ids"]
    return [_open_ended(tokenizer, text, ids) for text, ids in zip(texts, encoded, strict=True)]


def _open_ended(tokenizer: Any, text: str, ids: Sequence[int]) -> list[int]:
    """Drop an end-of-sequence token that the tokenizer has added, because the policy continues the text."""
    end = getattr(tokenizer, "eos_token_id", None)
    was_added = end is not None and ids[-1:] == [end] and not text.endswith(tokenizer.eos_token)
    if was_added:
        return list(ids[:-1])
    return list(ids)


def _prompt_text(
    tokenizer: Any, prompt: Prompt, problem: Problem, *, with_images: bool = False
) -> tuple[str, bool]:
    """Return the text that the policy continues, and True if the tokenizer adds its special tokens to it.

    A chat template writes the special tokens itself.
    """
    if with_images:
        check_image_prompt(prompt)
        return _chat(tokenizer, [image_message(prompt, problem)]), False
    if problem.metadata.get("images"):
        raise UserError(
            f"problem {problem.id!r} has images, and these token ids would leave them out: {IMAGES}"
        )
    if not prompt.use_chat_template:
        text = "\n".join(message["content"] for message in chat_messages(prompt, problem))
        return text + prompt.response_prefix, True
    return _chat(tokenizer, chat_messages(prompt, problem)) + prompt.response_prefix, False


def _chat(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> str:
    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template; use an instruction-tuned "
            "model's, put chat_template.jinja into its folder, or do without: "
            "nemo_grpo.prompt.use_chat_template=false in a recipe, --prompt tr_grpo_math in eval"
        )
    # Imported late, because most commands render no template. transformers also imports it only for one.
    from jinja2 import TemplateError

    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        roles = " and ".join(str(message["role"]) for message in messages)
        raise UserError(
            f"the chat template of the tokenizer {tokenizer.name_or_path!r} refuses the messages ({roles}): "
            f"{first_line(error)}; some take no system message: set nemo_grpo.prompt.system=null and put its "
            "text into nemo_grpo.prompt.template in a recipe, or use --prompt lighteval in eval"
        ) from error
    return text


def check_vocabulary(prompt: Sequence[int], problem: Problem, vocab_size: int | None) -> None:
    """Refuse prompt tokens without an embedding in the model.

    Args:
        prompt: the prompt's tokens.
        problem: the problem, which the message names.
        vocab_size: rows of the model's embedding; None if unknown.
    """
    # On a GPU such a token fails as a device-side assertion, which does not name the token.
    if vocab_size is not None and max(prompt, default=0) >= vocab_size:
        raise UserError(
            f"problem {problem.id!r}: the tokenizer gives token {max(prompt)}, and the model's vocab_size is "
            f"{vocab_size}; put the model's own tokenizer into its folder"
        )


def encode_prompts(
    problems: Sequence[Problem],
    tokenizer: Any,
    prompt: Prompt,
    *,
    limit: int,
    max_new_tokens: int,
    vocab_size: int,
) -> list[list[int]]:
    """Encode each prompt, and check that a response fits.

    Args:
        problems: the problems.
        tokenizer: a Hugging Face tokenizer.
        prompt: the recipe's.
        limit: longest sequence, prompt and response.
        max_new_tokens: longest response.
        vocab_size: the policy's.
    """
    prompts = encode_many(tokenizer, prompt, problems)
    for tokens, problem in zip(prompts, problems, strict=True):
        check_vocabulary(tokens, problem, vocab_size)
        total = len(tokens) + max_new_tokens
        if total > limit:
            raise UserError(
                f"policy.max_total_sequence_length={limit}: problem {problem.id!r} has a prompt of "
                f"{len(tokens)} tokens, which with max_new_tokens={max_new_tokens} need {total}; raise it, "
                "or leave the problem out"
            )
    return prompts
