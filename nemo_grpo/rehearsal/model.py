"""A rehearsal's model: a small one of the recipe's family and architecture, with a tokenizer."""

import json
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from nemo_grpo.engine.task_tokenizer import build_tokenizer
from nemo_grpo.models import COMPUTED, ModelSpec
from nemo_grpo.plan.inputs import PRESETS, shape_of
from nemo_grpo.recipe import Recipe
from nemo_grpo.recipe.host import has_images
from nemo_grpo.rehearsal import vision
from nemo_grpo.rehearsal.tiny_data import ToyTask
from nemo_grpo.run.demonstrations import demonstrated
from nemo_grpo.run.groups import Group, assemble
from nemo_grpo.support.errors import UserError
from nemo_grpo.support.model_folder import with_config_overrides
from nemo_grpo.tasks import Problem, Prompt, chat_messages, encode_prompt
from nemo_grpo.tasks.prompts import PROMPTS_CHECKED

HEAD_DIM = 32
"""The smallest head size of vLLM's attention on a CPU."""
NUM_HEADS = 4
NUM_LAYERS = 2
FFN = 256
NUM_EXPERTS = 4
NOT_SHRUNK = ("model_type", "layer_types", "max_window_layers", "mlp_only_layers")
"""Keys of a config.json that depend on its own number of layers, or are set separately."""
ROPE_KEYS = ("rope_parameters", "rope_scaling")
"""Keys of a config.json's rotary embedding."""
ROPE_FACTORS = ("short_factor", "long_factor")
"""Lists in it with one number per pair of a head's elements."""
ROOM = 8
"""Extra tokens of a prompt and of a response beyond the longest that was measured."""
VOCABULARY = 1024
"""Maximum vocabulary of a tokenizer learnt for the rehearsal."""
LEARNING_RATE = 3e-3
WARM_UP_STEPS = 30
MODEL_TYPES = (*(family.model_type for family in COMPUTED), "qwen3_moe", "qwen2_5_vl")
"""Families whose layers a rehearsal can compute: the embedded engine's, megatron-core's own experts, and one
with transformers' own vision tower."""
DENSE = "Qwen/Qwen2.5-1.5B"
"""Dense model that is shrunk if the recipe's is of another family."""
EXPERTS = "Qwen/Qwen3-30B-A3B"
"""Model with experts that is shrunk then."""
IMAGES = "Qwen/Qwen2.5-VL-3B-Instruct"
"""Model with images that is shrunk then."""
LEARNT_TOKENIZER = "learnt from its prompts"
RECIPES_TOKENIZER = "the recipe's"


@dataclass(frozen=True)
class RehearsalModel:
    """A folder that transformers, NeMo-RL and vLLM load.

    Attributes:
        folder: the model's and its tokenizer's.
        tokenizer: its origin, a clause for the report.
        architecture: its origin, a clause for the report.
        longest_prompt: most tokens of a problem's prompt.
        longest_response: most tokens of a demonstration.
        vocab_size: tokens of its vocabulary.
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


def rehearsed_shape(recipe: Recipe) -> tuple[ModelSpec, str]:
    """Return (the recipe's model, "") or (a model of a computed family, why it stands in)."""
    try:
        shape = shape_of(recipe)
    except UserError:
        reason = "which is not known here"
        has_experts = recipe.policy.layout.expert > 1
    else:
        if shape.model_type in MODEL_TYPES:
            return shape, ""
        reason = f"because the layers of {shape.model_type} are not computed on a CPU"
        has_experts = shape.num_experts > 0
    if has_images(recipe):
        name = IMAGES
    else:
        name = EXPERTS if has_experts else DENSE
    return PRESETS[name], f"in place of {recipe.policy.model_name}, {reason}"


def small_config(recipe: Recipe, vocab_size: int, tokenizer: Any) -> tuple[Any, str]:
    """Make a small transformers configuration of the recipe's family; also returns a clause on its origin.

    Everything that shapes the computation stays (biases, norms on q and k, tied embeddings, grouped heads,
    rotary scaling, experts); sizes shrink. Heads and layers stay divisible by 2, for TP and PP.
    """
    from transformers import AutoConfig

    shape, stand_in_reason = rehearsed_shape(recipe)
    full_config = {} if stand_in_reason else _config_file(recipe)
    origin = f"{shape.model_type} of {shape.name}, shrunk, from "
    origin += "its config.json" if full_config else "the planner's table"
    if stand_in_reason:
        origin += f", {stand_in_reason}"
    sizes = _small_sizes(shape, vocab_size, tokenizer)
    if shape.num_vision_parameters:
        settings = vision.config_of(shape, sizes, tokenizer)
        return AutoConfig.for_model(shape.model_type, **settings), origin

    if not full_config:
        full_config = {"max_position_embeddings": shape.max_position_embeddings}
        if shape.rope["rope_type"] != "default":
            full_config["rope_parameters"] = dict(shape.rope)
    settings = {name: value for name, value in full_config.items() if name not in NOT_SHRUNK}
    for key in ROPE_KEYS:
        if settings.get(key):
            settings[key] = _rope_of_small_heads(settings[key])
    settings |= sizes
    # Every sequence of a rehearsal is shorter than a model's window; Mistral's default would be one of 4096.
    settings |= {"use_sliding_window": False, "sliding_window": None}
    return AutoConfig.for_model(shape.model_type, **settings), origin


def _small_sizes(shape: ModelSpec, vocab_size: int, tokenizer: Any) -> dict[str, Any]:
    """Return the settings of a configuration that shrink, and the tokenizer's."""
    has_grouped_heads = shape.num_key_value_heads < shape.num_attention_heads
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": NUM_HEADS * HEAD_DIM,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_HEADS // 2 if has_grouped_heads else NUM_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": FFN,
        "tie_word_embeddings": shape.tied_embeddings,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if shape.num_experts:
        sizes |= {"num_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": FFN // 2}
    return sizes


def _rope_of_small_heads(rope: dict[str, Any]) -> dict[str, Any]:
    """Shorten the lists of a rotary embedding to the small heads."""
    shortened = {name: rope[name][: HEAD_DIM // 2] for name in ROPE_FACTORS if rope.get(name)}
    return {**rope, **shortened}


def _config_file(recipe: Recipe) -> dict[str, Any]:
    """Read the model's config.json from its folder or the cache, without a network; {} if it is not there."""
    from huggingface_hub import try_to_load_from_cache

    name = recipe.policy.model_name or ""
    path = Path(name) / "config.json"
    if not Path(name).is_dir():
        # No path but an object means that the hub has no such file, as an earlier download found out.
        cached = try_to_load_from_cache(name, "config.json")
        if isinstance(cached, str):
            path = Path(cached)
    if not path.is_file():
        return {}
    return with_config_overrides(json.loads(path.read_text()), recipe.policy.hf_config_overrides)


class _Corpus(ToyTask):
    """The task with whole prompts as questions: training text for a tokenizer."""

    def __init__(self, task: ToyTask, prompt: Prompt) -> None:
        self.__dict__.update(vars(task), prompt=prompt)

    def train_problem(self, index: int, seed: int) -> Problem:
        problem = super().train_problem(index, seed)
        messages = chat_messages(self.prompt, problem)
        return replace(problem, question="\n".join(message["content"] for message in messages))


def make_model(recipe: Recipe, task: ToyTask, num_validation: int, folder: Path) -> RehearsalModel:
    """Make the model, train it on the run's first problems, and write it in BF16.

    Args:
        recipe: with the task and the prompt that the model learns.
        task: its problems with short demonstrations.
        num_validation: validation problems, whose prompts must fit too.
        folder: gets model and tokenizer.
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
    prompt_lengths = []
    response_lengths = []
    for problem in problems:
        prompt_lengths.append(len(encoder.tokens(problem)))
        demonstration = _demonstration(encoder, run_task, problem, rng)
        response_lengths.append(len(demonstration.responses[0].response.tokens))

    # Its products are small, and the other cores are left alone.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = vision.model_class(config).from_config(config, dtype=torch.float32)
    demonstrations = (_demonstration(encoder, task, problem, rng) for problem in cycle(task.learnt_problems))
    # The output layer of a full tokenizer makes each step much slower.
    has_small_vocabulary = vocab_size <= 4 * VOCABULARY
    num_steps, batch_size = (120, 16) if has_small_vocabulary else (40, 4)
    pretrain(model, demonstrations, encoder, num_steps, batch_size)

    rehearsal_model = RehearsalModel(
        folder,
        tokenizer_origin,
        architecture,
        longest_prompt=max(prompt_lengths),
        longest_response=max(response_lengths),
        vocab_size=vocab_size,
    )
    text_config = model.config.get_text_config()
    positions = max(text_config.max_position_embeddings, rehearsal_model.context)
    text_config.max_position_embeddings = positions
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer_or_processor = tokenizer if encoder.processor is None else encoder.processor
    tokenizer_or_processor.save_pretrained(folder)
    return rehearsal_model


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
        return self._encoded(problem)[0]

    def inputs(self, model: Any, ids: Any, problems: Iterable[Problem]) -> dict[str, Any]:
        """Encode the images of the tokens [B, S], whose rows belong to the problems."""
        if self.processor is None:
            return {}
        inputs_by_row = [self._encoded(problem)[1] for problem in problems]
        return vision.inputs_of(ids, model.config.image_token_id, inputs_by_row)


def _encoder_of(recipe: Recipe, task: ToyTask) -> tuple[Encoder, str]:
    """Make the encoder with the recipe's tokenizer; with images, or without one here, with a trained one."""
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
    """Encode a demonstration of any length: the model's context follows from the longest."""
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
