"""Problems as prompts that the policy can go on from."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from checkpoints_conv.formats.model_folder import side_files
from nemo_grpo.errors import UserError
from nemo_grpo.files import sha256_of
from nemo_grpo.tasks import Problem, Prompt, Task
from nemo_grpo.tasks.prompts import check_vocabulary, encode_many

log = logging.getLogger(__name__)

PROMPTS_CHECKED = 64
"""Encoded at a time before a run starts; of an endless stream of problems no more."""
CHECKED_DIR = Path(".cache") / "checked_prompts"
"""An empty file for each set of files and settings whose prompts were checked."""


def check_training_prompts(
    task: Task, encode: Callable[[list[Problem]], object], seed: int, source: Path, settings: object
) -> None:
    """Encode every training prompt, of an endless stream the first ones; of the same files only once.

    Args:   encode: raises if a prompt cannot be used.  source: the model's folder, with the tokenizer.
            settings: what else the result depends on; its repr tells.
    Raises: what ``encode`` raises.
    """
    checked = _marker(task, source, settings)
    if checked is not None and checked.exists():
        return
    number = getattr(task, "num_train_problems", PROMPTS_CHECKED)
    for start in range(0, number, PROMPTS_CHECKED):
        indices = range(start, min(start + PROMPTS_CHECKED, number))
        encode([task.train_problem(index, seed) for index in indices])
    if checked is not None:
        try:
            checked.parent.mkdir(parents=True, exist_ok=True)
            checked.touch()
        except OSError as error:
            log.info("%s: %s; the next start encodes all prompts again", checked, error.strerror)


def _marker(task: Task, source: Path, settings: object) -> Path | None:
    """The file in `CHECKED_DIR` for these prompts; None for a task without files."""
    files = getattr(task.config, "train_files", ())
    if not files:
        return None
    held_out = getattr(task.config, "validation_files", ())  # training drops the same questions
    hashes = [sha256_of(Path(path)) for path in (*files, *held_out, *side_files(source))]
    content = repr(
        (hashes, len(files), task.config, settings, version("transformers"), version("tokenizers"))
    )
    return CHECKED_DIR / hashlib.sha256(content.encode()).hexdigest()[:32]


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
