"""A rehearsal's model: a small one of the recipe's family and architecture, with a tokenizer."""

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from nemo_grpo.engine.task_tokenizer import build_tokenizer
from nemo_grpo.recipe import Recipe
from nemo_grpo.rehearsal import vision
from nemo_grpo.rehearsal.small_config import small_config
from nemo_grpo.rehearsal.tiny_data import ToyTask
from nemo_grpo.run.demonstrations import demonstrated
from nemo_grpo.run.groups import Group, assemble
from nemo_grpo.tasks import Problem, Prompt, chat_messages, encode_prompt
from nemo_grpo.tasks.prompts import PROMPTS_CHECKED

ROOM = 8
"""Extra tokens of a prompt and of a response beyond the longest that was measured."""
VOCABULARY = 1024
"""Maximum vocabulary of a tokenizer learnt for the rehearsal."""
LEARNING_RATE = 3e-3
WARM_UP_STEPS = 30
LEARNT_TOKENIZER = "learnt from its prompts"
RECIPES_TOKENIZER = "the recipe's"


@dataclass(frozen=True)
class RehearsalModel:
    """A folder that transformers, NeMo-RL and vLLM load.

    Attributes:
        folder: folder of the model and its tokenizer.
        tokenizer: origin of the tokenizer, a clause for the report.
        architecture: origin of the architecture, a clause for the report.
        longest_prompt: most tokens of a problem's prompt.
        longest_response: most tokens of a demonstration.
        vocab_size: tokens in the model's vocabulary.
    """

    folder: Path
    tokenizer: str
    architecture: str
    longest_prompt: int
    longest_response: int
    vocab_size: int

    @property
    def max_prompt_tokens(self) -> int:
        """Limit of a prompt in the rehearsal."""
        return self.longest_prompt + ROOM

    @property
    def max_new_tokens(self) -> int:
        """Limit of a response in the rehearsal."""
        return multiple_of(self.longest_response + ROOM, 8)

    @property
    def context(self) -> int:
        """Limit of a prompt with its response; the layouts of a rehearsal divide it."""
        return multiple_of(self.max_prompt_tokens + self.max_new_tokens, 64)


def multiple_of(number: int, unit: int) -> int:
    """Round up to a multiple of the unit."""
    return -(-number // unit) * unit


class _Corpus(ToyTask):
    """The task's problems with the whole prompt as question, so that a tokenizer learns the prompt's text."""

    def __init__(self, task: ToyTask, prompt: Prompt) -> None:
        self.__dict__.update(vars(task), prompt=prompt)

    def train_problem(self, index: int, seed: int) -> Problem:
        problem = super().train_problem(index, seed)
        messages = chat_messages(self.prompt, problem)
        return replace(problem, question="\n".join(message["content"] for message in messages))


def make_model(
    recipe: Recipe, task: ToyTask, num_validation: int, folder: Path, *, replaces_nemo_rl_data: bool
) -> RehearsalModel:
    """Make the model, train it on the run's first problems, and write it in BF16.

    Args:
        recipe: recipe with the task and the prompt that the model learns.
        task: its problems with short demonstrations.
        num_validation: validation problems, whose prompts must fit too.
        folder: gets model and tokenizer.
        replaces_nemo_rl_data: True if the problems stand in for data of NeMo-RL.
    """
    import torch

    encoder, tokenizer_origin = _encoder_of(recipe, task)
    tokenizer = encoder.tokenizer
    vocab_size = multiple_of(len(tokenizer), 8)
    config, architecture = small_config(recipe, vocab_size, tokenizer)
    rng = random.Random(0)
    problems = _measured_problems(recipe, task, num_validation)
    # A supervised run trains on the task's demonstrations, not on the short ones.
    run_task = task.task if recipe.loss_fn.learns_from_demonstrations else task
    longest_prompt = max(len(encoder.tokens(problem)) for problem in problems)
    groups = [_demonstration(encoder, run_task, problem, rng) for problem in problems]
    longest_response = max(len(group.responses[0].response.tokens) for group in groups)

    # The matrix products are too small to gain from more threads, which would take cores from other work.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = vision.model_class(config).from_config(config, dtype=torch.float32)
    demonstrations = (_demonstration(encoder, task, problem, rng) for problem in cycle(task.learnt_problems))
    pretrain(model, demonstrations, encoder, *_training_length(vocab_size, replaces_nemo_rl_data))

    rehearsal_model = RehearsalModel(
        folder, tokenizer_origin, architecture, longest_prompt, longest_response, vocab_size
    )
    text_config = model.config.get_text_config()
    positions = max(text_config.max_position_embeddings, rehearsal_model.context)
    text_config.max_position_embeddings = positions
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer_or_processor = tokenizer if encoder.processor is None else encoder.processor
    tokenizer_or_processor.save_pretrained(folder)
    return rehearsal_model


def _training_length(vocab_size: int, replaces_nemo_rl_data: bool) -> tuple[int, int]:
    """Choose the number of steps and the batch size for the small model's training."""
    if vocab_size > 4 * VOCABULARY:
        # The large output layer of a full tokenizer makes every step slow.
        return 40, 4
    if replaces_nemo_rl_data:
        # After 120 steps rewards differed in one of ten of DAPO's groups of sums, after 200 in three of four.
        return 200, 16
    # After 200 steps ERPO's advantages in BF16 differed from float32's by 4.9 %, after 120 by under 2 %.
    return 120, 16


def _measured_problems(recipe: Recipe, task: ToyTask, num_validation: int) -> list[Problem]:
    """List the problems whose prompts and responses must fit into the small model's context."""
    training = task.learnt_problems
    if recipe.loss_fn.learns_from_demonstrations:
        # The driver encodes all of these before it starts.
        number = getattr(task.task, "num_train_problems", PROMPTS_CHECKED)
        if number:
            training = [task.task.train_problem(index, recipe.grpo.seed) for index in range(number)]
    held_out = task.validation_problems(num_validation) if num_validation else []
    return [*training, *held_out]


@dataclass(frozen=True)
class Encoder:
    """Encodes problems for the model.

    Attributes:
        tokenizer: the model's.
        prompt: the recipe's.
        processor: the model's; None without images.
    """

    tokenizer: Any
    prompt: Prompt
    processor: Any = None
    _cache: dict[str, tuple[list[int], dict[str, Any]]] = field(default_factory=dict)

    def _encoded(self, problem: Problem) -> tuple[list[int], dict[str, Any]]:
        """Return tokens and images of a problem; each image is processed once."""
        if problem.id not in self._cache:
            self._cache[problem.id] = vision.encoded(self.processor, self.prompt, problem)
        return self._cache[problem.id]

    def tokens(self, problem: Problem) -> list[int]:
        """Encode the prompt, with an image's placeholders."""
        if self.processor is None:
            return encode_prompt(self.tokenizer, self.prompt, problem)
        tokens, _ = self._encoded(problem)
        return tokens

    def inputs(self, model: Any, ids: Any, problems: Iterable[Problem]) -> dict[str, Any]:
        """Encode the images of the tokens [B, S], whose rows belong to the problems."""
        if self.processor is None:
            return {}
        inputs_by_row = [self._encoded(problem)[1] for problem in problems]
        return vision.inputs_of(ids, model.config.image_token_id, inputs_by_row)


def _encoder_of(recipe: Recipe, task: ToyTask) -> tuple[Encoder, str]:
    """Make the encoder, and a clause on the tokenizer's origin for the report.

    A new tokenizer is trained for images, or if the recipe's is not on this machine.
    """
    from transformers import AutoTokenizer

    prompt = recipe.nemo_grpo.prompt
    name = recipe.policy.tokenizer.name or recipe.policy.model_name
    needs_images = task.config.needs_images
    if not needs_images:
        # A tokenizer that is neither in a folder nor in the cache is learnt, instead of downloaded.
        with suppress(OSError, ValueError):
            tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=True)
            return Encoder(tokenizer, prompt), RECIPES_TOKENIZER
    tokenizer = build_tokenizer(_Corpus(task, prompt), VOCABULARY, 0)
    processor = vision.processor_of(tokenizer) if needs_images else None
    return Encoder(tokenizer, prompt, processor), LEARNT_TOKENIZER


def _demonstration(encoder: Encoder, task: Any, problem: Problem, rng: random.Random) -> Group:
    """Encode a demonstration, without a limit: the longest one determines the model's context."""
    return demonstrated(
        encoder.tokenizer,
        task,
        encoder.prompt,
        problem,
        rng,
        prompt_tokens=encoder.tokens(problem),
        limit=sys.maxsize,
        key="max_position_embeddings",
    )


def pretrain(model: Any, stream: Iterator[Group], encoder: Encoder, num_steps: int, batch_size: int) -> None:
    """Train a transformers model in place on an endless stream of demonstrations.

    The embedded engine cannot train it: it computes fewer families than a rehearsal has.
    """
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98))
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARM_UP_STEPS, total_iters=WARM_UP_STEPS)
    model.train()
    for _ in range(num_steps):
        groups = list(islice(stream, batch_size))
        step = assemble(groups)
        ids = step.sequences.input_ids
        # -100 is the label that cross_entropy leaves out.
        labels = ids[:, 1:].masked_fill(~step.token_mask, -100)
        image_inputs = encoder.inputs(model, ids, [group.problem for group in groups])
        logits = model(ids, **image_inputs).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warm_up.step()
    model.eval()
