"""A recipe's task as NeMo-RL's data: its problems by number, encoded as the policy sees them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nemo_grpo.nemorl import compat
from nemo_grpo.nemorl.host_api import IMAGES
from nemo_grpo.tasks import Problem, Prompt, encode_prompt
from nemo_grpo.tasks.base import Episode, MultiTurnTask, make_ready
from nemo_grpo.tasks.prompts import check_image_prompt, image_message

if TYPE_CHECKING:
    from nemo_grpo.nemorl.config import ClusterRun

TASK_NAME = "nemo_grpo"
"""NeMo-RL's name of the task, for the table of environments."""
ASYNC_SPARE = 10
"""Factor on the length of asynchronous training's data, of which it makes one pass. It skips prompts that no
step awaits, that fail, or that grow too old. A longer stream costs nothing: problems are read on demand."""
SHORTENED = 4
"""Tokens kept of a prompt that is too long; it is not trained on."""


class TaskProblems(NamedTuple):
    """Problems of a run.

    Attributes:
        task: the recipe's.
        held_out: its validation problems; none if the run never validates.
    """

    task: Any
    held_out: list[Problem]


def read_problems(run: ClusterRun) -> TaskProblems:
    """Read the task's files and check all that needs neither Ray, tokenizer nor GPUs."""
    grpo = run.recipe.grpo
    task = run.recipe.task.build()
    if run.has_images:
        compat.require(IMAGES)
        check_image_prompt(run.recipe.nemo_grpo.prompt)
    # Reads the training files, so that a missing one is found now.
    task.train_problem(0, grpo.seed)
    make_ready(task)
    held_out = task.validation_problems(grpo.num_val_problems) if grpo.validates else []
    return TaskProblems(task, held_out)


def num_prompts(run: ClusterRun) -> int:
    """Count the prompts that the run can draw at most, which is the length of its one epoch."""
    grpo = run.recipe.grpo
    draws = 1
    if grpo.use_dynamic_sampling:
        _, draws = run.recipe.loss_fn.resampling(grpo.dynamic_sampling_max_gen_batches)
    if run.is_async:
        draws = ASYNC_SPARE
    return grpo.max_num_steps * run.num_prompts_per_draw * max(draws, 1)


Encode = Callable[[Problem], dict[str, Any]]
"""A problem -> the parts of NeMo-RL's datum that depend on the prompt."""


class TaskDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Problems by number as NeMo-RL data: the prompt, and what the environment needs."""

    def __init__(self, problem: Callable[[int], Problem], size: int, encode: Encode, task: Any) -> None:
        self.problem = problem
        self.size = size
        self.encode = encode
        self.stop_texts = list(task.stop_texts) if isinstance(task, MultiTurnTask) else None

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        # Python's iteration over a data set ends at an IndexError, which the task's endless problems never
        # raise.
        if not 0 <= index < self.size:
            raise IndexError(index)
        problem = self.problem(index)
        info = {"problem": asdict(problem), "episode": asdict(Episode()), "rewarded": 0.0}
        return {
            **self.encode(problem),
            "extra_env_info": info,
            "idx": index,
            "task_name": TASK_NAME,
            "stop_strings": self.stop_texts,
        }


def prompt_encoder(prompt: Prompt, encoder: Any, has_images: bool, max_prompt_length: int) -> Encode:
    """Choose the function that encodes a problem: the embedded engine's, or NeMo-RL's for images."""
    encode = image_prompt if has_images else text_prompt
    return partial(encode, prompt, encoder, max_length=max_prompt_length)


def text_prompt(prompt: Prompt, tokenizer: Any, problem: Problem, max_length: int) -> dict[str, Any]:
    """Encode one user message; a prompt that is too long is cut and excluded from the loss."""
    tokens = encode_prompt(tokenizer, prompt, problem)
    fits = len(tokens) < max_length
    if not fits:
        tokens = tokens[:SHORTENED]
    message = {"role": "user", "content": tokenizer.decode(tokens), "token_ids": torch.tensor(tokens)}
    return {"message_log": [message], "length": len(tokens), "loss_multiplier": float(fits)}


def image_prompt(prompt: Prompt, processor: Any, problem: Problem, max_length: int) -> dict[str, Any]:
    """Encode prompt and images by NeMo-RL's own function for vision models."""
    datum = {
        # One of the task names whose messages NeMo-RL's function passes through.
        "task_name": "avqa",
        "messages": [image_message(prompt, problem), {"role": "assistant", "content": problem.answer}],
    }
    spec = compat.import_name("nemo_rl.data.interfaces:TaskDataSpec")()
    process = compat.import_name("nemo_rl.data.processors:vlm_hf_data_processor")
    return dict(process(datum, spec, processor, max_length, 0))
