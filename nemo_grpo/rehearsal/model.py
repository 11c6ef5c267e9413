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
NUM_HEADS, NUM_LAYERS, FFN, NUM_EXPERTS = 4, 2, 256, 4
NOT_SHRUNK = ("model_type", "layer_types", "max_window_layers", "mlp_only_layers")
"""Keys of a config.json that depend on its own number of layers, or are set separately."""
ROPE_KEYS, ROPE_FACTORS = ("rope_parameters", "rope_scaling"), ("short_factor", "long_factor")
"""Keys of a config.json's rotary embedding, and their lists of one number per pair of a head's elements."""
ROOM = 8
"""Extra tokens of a prompt and of a response beyond the longest that was measured."""
VOCABULARY = 1024
"""Maximum vocabulary of a tokenizer learnt for the rehearsal."""
LEARNING_RATE, WARM_UP_STEPS = 3e-3, 30
MODEL_TYPES = (*(family.model_type for family in COMPUTED), "qwen3_moe", "qwen2_5_vl")
"""Families whose layers a rehearsal can compute: the embedded engine's, megatron-core's own experts, and one
with transformers' own vision tower."""
DENSE, EXPERTS, IMAGES = "Qwen/Qwen2.5-1.5B", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen2.5-VL-3B-Instruct"
"""Models that are shrunk if the recipe's is of another family."""
MADE_TOKENIZER, OWN_TOKENIZER = "learnt from its prompts", "the recipe's"


@dataclass(frozen=True)
class RehearsalModel:
    """A folder that transformers, NeMo-RL and vLLM load.

    Attributes: tokenizer, architecture: origin of each, a clause for the report.
                longest_prompt, longest_response: tokens of the problems' prompts and demonstrations.
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
        why, has_experts = "which is not known here", recipe.policy.layout.expert > 1
    else:
        if shape.model_type in MODEL_TYPES:
            return shape, ""
        why = f"because the layers of {shape.model_type} are not computed on a CPU"
        has_experts = shape.num_experts > 0
    name = IMAGES if has_images(recipe) else EXPERTS if has_experts else DENSE
    return PRESETS[name], f"in place of {recipe.policy.model_name}, {why}"


def small_config(recipe: Recipe, vocab_size: int, tokenizer: Any) -> tuple[Any, str]:
    """Make a small transformers configuration of the recipe's family; also returns a clause on its origin.

    Everything that shapes the computation stays (biases, norms on q and k, tied embeddings, grouped heads,
    rotary scaling, experts); sizes shrink. Heads and layers stay divisible by 2, for TP and PP.
    """
    from transformers import AutoConfig

    shape, why = rehearsed_shape(recipe)
    given = {} if why else _config_file(recipe)
    source = "its config.json" if given else "the planner's table"
    is_grouped = shape.num_key_value_heads < shape.num_attention_heads
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": NUM_HEADS * HEAD_DIM,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_HEADS // 2 if is_grouped else NUM_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": FFN,
        "tie_word_embeddings": shape.tied_embeddings,
        **{name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }
    if shape.num_experts:
        sizes |= {"num_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": FFN // 2}
    if not given:
        given = {"max_position_embeddings": shape.max_position_embeddings}
        given |= {} if shape.rope["rope_type"] == "default" else {"rope_parameters": dict(shape.rope)}
    kept = {name: value for name, value in given.items() if name not in NOT_SHRUNK}
    for key in ROPE_KEYS:
        if kept.get(key):
            kept[key] = _rope_of_small_heads(kept[key])
    # every sequence of a rehearsal is shorter than a model's window; Mistral's default would be one of 4096
    settings = {**kept, **sizes, "use_sliding_window": False, "sliding_window": None}
    if shape.num_vision_parameters:
        settings = vision.config_of(shape, sizes, tokenizer)
    config = AutoConfig.for_model(shape.model_type, **settings)
    return config, f"{shape.model_type} of {shape.name}, shrunk, from {source}{why and f', {why}'}"


def _rope_of_small_heads(rope: dict[str, Any]) -> dict[str, Any]:
    """Shorten the lists of a rotary embedding to the small heads."""
    shortened = {name: rope[name][: HEAD_DIM // 2] for name in ROPE_FACTORS if rope.get(name)}
    return {**rope, **shortened}


def _config_file(recipe: Recipe) -> dict[str, Any]:
    from huggingface_hub import try_to_load_from_cache

    name = recipe.policy.model_name or ""
    cached = None if Path(name).is_dir() else try_to_load_from_cache(name, "config.json")
    path = Path(cached) if isinstance(cached, str) else Path(name) / "config.json"
    if not path.is_file():
        return {}
    return with_config_overrides(json.loads(path.read_text()), recipe.policy.hf_config_overrides)


class _Corpus(ToyTask):
    """The task with whole prompts as questions: training text for a tokenizer."""

    def __init__(self, task: ToyTask, prompt: Prompt) -> None:
        self.__dict__.update(vars(task), prompt=prompt)

    def train_problem(self, index: int, seed: int) -> Problem:
        problem = super().train_problem(index, seed)
        shown = "\n".join(message["content"] for message in chat_messages(self.prompt, problem))
        return replace(problem, question=shown)


def make_model(recipe: Recipe, task: ToyTask, num_validation: int, folder: Path) -> RehearsalModel:
    """Make the model, train it on the run's first problems, and write it in BF16.

    Args: num_validation: validation problems, whose prompts must fit too.
    """
    import torch

    encoder, tokenizer_origin = _encoder_of(recipe, task)
    tokenizer = encoder.tokenizer
    vocab_size = multiple_of(len(tokenizer), 8)
    config, architecture = small_config(recipe, vocab_size, tokenizer)
    rng = random.Random(0)
    held_out = task.validation_problems(num_validation) if num_validation else []
    learns = recipe.loss_fn.learns_from_demonstrations
    # with demonstrations the driver encodes all of these before it starts
    number = getattr(task.task, "num_train_problems", PROMPTS_CHECKED) if learns else 0
    first = [task.task.train_problem(index, recipe.grpo.seed) for index in range(number)]
    problems = [*(first or task.learnt_problems), *held_out]
    prompts = [len(encoder.tokens(problem)) for problem in problems]
    shown = task.task if learns else task
    responses = [len(_shown(encoder, shown, p, rng).responses[0].response.tokens) for p in problems]
    torch.set_num_threads(1)  # small products; leave the other cores alone
    torch.manual_seed(0)
    model = vision.model_class(config).from_config(config, dtype=torch.float32)
    demonstrations = (_shown(encoder, task, problem, rng) for problem in cycle(task.learnt_problems))
    pretrain(model, demonstrations, encoder, *((120, 16) if vocab_size <= 4 * VOCABULARY else (40, 4)))
    made = RehearsalModel(folder, tokenizer_origin, architecture, max(prompts), max(responses), vocab_size)
    text = model.config.get_text_config()
    text.max_position_embeddings = max(text.max_position_embeddings, made.context)
    model.to(torch.bfloat16).save_pretrained(folder)
    (encoder.processor or tokenizer).save_pretrained(folder)
    return made


@dataclass(frozen=True)
class Encoder:
    """Encodes problems for the model.  Attributes: processor: None without images."""

    tokenizer: Any
    prompt: Prompt
    processor: Any = None
    _seen: dict[str, tuple[list[int], dict[str, Any]]] = field(default_factory=dict)

    def _encoded(self, problem: Problem) -> tuple[list[int], dict[str, Any]]:
        if problem.id not in self._seen:
            self._seen[problem.id] = vision.encoded(self.processor, self.prompt, problem)
        return self._seen[problem.id]

    def tokens(self, problem: Problem) -> list[int]:
        """Encode the prompt, with an image's placeholders."""
        if self.processor is None:
            return encode_prompt(self.tokenizer, self.prompt, problem)
        return self._encoded(problem)[0]

    def inputs(self, model: Any, ids: Any, problems: Iterable[Problem]) -> dict[str, Any]:
        """Encode the images of the tokens [B, S], whose rows belong to the problems."""
        if self.processor is None:
            return {}
        seen = [self._encoded(problem)[1] for problem in problems]
        return vision.inputs_of(ids, model.config.image_token_id, seen)


def _encoder_of(recipe: Recipe, task: ToyTask) -> tuple[Encoder, str]:
    """Make the encoder with the recipe's tokenizer; with images, or without one here, with a trained one."""
    from transformers import AutoTokenizer

    prompt, name = recipe.nemo_grpo.prompt, recipe.policy.tokenizer.name or recipe.policy.model_name
    if not task.config.needs_images:
        with suppress(OSError, ValueError):
            return Encoder(AutoTokenizer.from_pretrained(name, local_files_only=True), prompt), OWN_TOKENIZER
    tokenizer = build_tokenizer(_Corpus(task, prompt), VOCABULARY, 0)
    processor = vision.processor_of(tokenizer) if task.config.needs_images else None
    return Encoder(tokenizer, prompt, processor), MADE_TOKENIZER


def _shown(encoder: Encoder, task: Any, problem: Problem, rng: random.Random) -> Group:
    limits: Any = {"limit": sys.maxsize, "key": "max_position_embeddings"}
    given = (encoder.tokenizer, task, encoder.prompt, problem, rng)
    return demonstrated(*given, prompt_tokens=encoder.tokens(problem), **limits)


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
        labels = ids[:, 1:].masked_fill(~step.token_mask, -100)
        logits = model(ids, **encoder.inputs(model, ids, [group.problem for group in groups])).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warm_up.step()
    model.eval()
