"""How an evaluation samples: the command's options, else the recipe's settings, else the defaults."""

import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

import torch

from nemo_grpo.errors import UserError
from nemo_grpo.evaluate.responses import fingerprint
from nemo_grpo.evaluate.suite import Conditions
from nemo_grpo.hf_folder import end_tokens, load_config
from nemo_grpo.recipe import Recipe
from nemo_grpo.sampling.generate_vllm import VLLMGenerator, check_sampling, vllm_device
from nemo_grpo.sampling.generators import build_local, choose
from nemo_grpo.sampling.requests import Request, Rollout, Sampler, SamplingParams, check_fits


@dataclass(frozen=True)
class Settings:
    """How responses are sampled. The defaults are ERPO's (A.3).

    Attributes:
        k: samples per problem.  max_tokens: longest response.
        stop_token_ids: beside the model's own, `end_tokens`.
        dtype: of the weights; auto: bfloat16 on a GPU, float32 on a CPU.
        batch_size: responses that are sampled together; not for vllm.
        tensor_parallel, cache_gib: of vllm: GPUs; memory of the KV cache.
        num_threads: on a CPU; None: torch's default.
    """

    k: int = 16
    temperature: float = 1.0
    top_p: float = 0.95
    max_tokens: int = 2048
    stop_token_ids: tuple[int, ...] = ()
    generator: str = "auto"
    dtype: str = "auto"
    device: str = "auto"
    batch_size: int = 256
    tensor_parallel: int = 1
    cache_gib: float | None = None
    num_threads: int | None = None
    seed: int = 0

    @classmethod
    def of(cls, recipe: Recipe | None, options: dict[str, Any]) -> Self:
        """``options``: None stands for the recipe's value, or the default."""
        given = {name: value for name, value in options.items() if value is not None}
        settings = cls(**{**({} if recipe is None else _of_recipe(recipe)), **given})
        if settings.k < 1:
            raise UserError(f"--k {settings.k} must be at least 1")
        return settings

    def conditions(self, model: Path, tokenizer: Any) -> Conditions:
        """Everything except the problems that a response depends on, by name.

        Raises: UserError: sampling that no generator supports, or an unavailable device or generator.
        """
        sampling = SamplingParams(
            max_new_tokens=self.max_tokens,
            temperature=self.temperature or 1.0,
            greedy=self.temperature == 0,
            top_p=self.top_p,
            stop_token_ids=(*end_tokens(model, tokenizer), *self.stop_token_ids),
        )
        uses_vllm = self.generator == "vllm"
        device = vllm_device(self.device) if uses_vllm else self.device
        on_gpu = device != "cpu" and torch.cuda.is_available()
        if device == "cuda" and not on_gpu:
            raise UserError("--device cuda: no CUDA device here; use cpu or auto")
        dtype = self.dtype if self.dtype != "auto" else "bfloat16" if on_gpu else "float32"
        # The device's name: results differ between kinds of device and between generators in the last digits.
        place = torch.cuda.get_device_name() if on_gpu else f"cpu ({platform.machine()})"
        generator = "vllm" if uses_vllm else choose(self.generator, model)
        return Conditions(fingerprint(model), generator, dtype, place, sampling, self.k, self.seed)

    def build_generator(
        self, model: Path, conditions: Conditions, longest: int, max_images: int = 0
    ) -> Sampler:
        """The generator of these conditions.

        Args: longest: tokens of the longest prompt.  max_images: the most images of a prompt.
        """
        sampling = conditions.sampling
        if conditions.generator == "vllm":
            check_sampling(sampling)  # loading takes longer
            return VLLMGenerator(
                model,
                conditions.dtype,
                max_model_len=longest + sampling.max_new_tokens,
                tensor_parallel_size=self.tensor_parallel,
                cache_bytes=None if self.cache_gib is None else int(self.cache_gib * (1 << 30)),
                max_images=max_images,
            )
        torch.set_num_threads(self.num_threads or torch.get_num_threads())
        device = "cpu" if conditions.device.startswith("cpu") else "cuda"
        dtype = getattr(torch, conditions.dtype)
        generator = build_local(conditions.generator, model, dtype, device, self.batch_size)
        check_fits(longest, sampling.max_new_tokens, *generator.context)
        return generator

    def problems_per_call(self, generator: str) -> int:
        """vLLM fills its batches itself; others get one batch at a time."""
        at_once = max(self.batch_size, 1024) if generator == "vllm" else self.batch_size
        return max(1, at_once // self.k)


def _of_recipe(recipe: Recipe) -> dict[str, Any]:
    section, generation = recipe.nemo_grpo, recipe.policy.generation
    return {
        "k": section.evaluation.num_samples,
        "temperature": section.evaluation.temperature,
        "top_p": section.evaluation.top_p,
        "max_tokens": generation.max_new_tokens,
        "stop_token_ids": tuple(generation.stop_token_ids or ()),
        "generator": section.engine.generator,
        "dtype": recipe.policy.precision,
        "device": section.engine.device,
        "batch_size": recipe.policy.generation_batch_size,
        "num_threads": section.engine.num_threads,
    }


CACHE_BYTES = 1 << 30
"""Of the KV cache of responses that are sampled together."""


def fitting_batch_size(model: Path, max_tokens: int) -> int:
    """Responses of this length whose KV cache fits `CACHE_BYTES` in float32, between 1 and the default.

    A large model then gets few at a time: answers come, and are on disk, early.
    """
    config = load_config(model).get_text_config()  # of a model with images, its decoder's
    if not hasattr(config, "num_attention_heads"):  # without attention there is no such cache
        return Settings.batch_size
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_response = 2 * 4 * config.num_hidden_layers * heads * width * max_tokens
    return max(1, min(Settings.batch_size, CACHE_BYTES // per_response))


class LazyGenerator:
    """Loads the model when the first response is needed: never if all are recorded.

    Args: build: makes the generator, with the model's weights.
    """

    def __init__(self, build: Callable[[], Sampler]) -> None:
        self.load = cache(build)

    def generate(self, request: Request) -> Rollout:
        """See `Sampler.generate`."""
        return self.load().generate(request)
