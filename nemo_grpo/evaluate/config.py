"""Configuration of an evaluation: model, benchmarks, sampling, generator and device."""

import hashlib
import platform
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch

from nemo_grpo.evaluate.passk import parse_ks
from nemo_grpo.recipe import Recipe
from nemo_grpo.recipe.own import NemoGRPOSection
from nemo_grpo.sampling.generate_vllm import VLLMGenerator, check_sampling, vllm_device
from nemo_grpo.sampling.generators import build_local, choose
from nemo_grpo.sampling.requests import Sampler, SamplingParams, check_fits
from nemo_grpo.support.errors import UserError, did_you_mean
from nemo_grpo.support.files import read_yaml, sha256_of
from nemo_grpo.support.hf_folder import end_tokens, load_config
from nemo_grpo.support.sections import EvalOptions, parse_seeds

PROTOCOLS: dict[str, dict[str, Any]] = read_yaml(Path(__file__).with_name("protocols.yaml"))
"""Papers' evaluations by name: fields of `EvalConfig` with the source of their values."""


@dataclass(frozen=True)
class EvalConfig:
    """Settings from the command line, a recipe and a protocol. The defaults are ERPO's (A.3).

    Fields that `EvalOptions` also has mean the same as there. A field is None if the benchmark, the model or
    the recipe decides its value.

    Attributes:
        presets: benchmark or task -> prompt preset, used if neither a recipe nor ``prompt`` is given.
        section: section ``nemo_grpo`` of a recipe, with its task and prompt.
        source: where the values of ``protocol`` were published. ``protocol`` is a key of `PROTOCOLS`.
        stop_token_ids: stop tokens; `resolved` puts the model's own (`end_tokens`) in front of them.
        num_threads: threads on a CPU; None is torch's default.
    """

    model: Path
    benchmarks: str | None = None
    data_dir: str = "data"
    num_problems: int | None = None
    task: str | None = None
    prompt: str | None = None
    presets: Mapping[str, str] = field(default_factory=dict)
    section: NemoGRPOSection | None = None
    protocol: str | None = None
    source: str = ""
    num_samples: int = 16
    pass_at: str | None = None
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
    seeds: str | None = None

    @classmethod
    def of(cls, model: Path, options: EvalOptions, recipe: Recipe | None = None) -> Self:
        """Merge options; each None becomes the protocol's value, else the recipe's, else the default.

        Raises:
            UserError: the protocol is unknown, or values exclude each other.
        """
        set_options = options.given()
        values = _recipe_values(recipe) if recipe else {}
        if options.seed is not None and options.seeds is None:
            # A single --seed replaces all seeds of the recipe.
            values.pop("seeds", None)
        protocol = set_options.get("protocol", values.get("protocol"))
        if protocol is not None:
            if protocol not in PROTOCOLS:
                raise UserError(f"--protocol {protocol} is unknown{did_you_mean(protocol, PROTOCOLS)}")
            values |= PROTOCOLS[protocol]
        values |= set_options
        if "batch_size" not in values:
            values["batch_size"] = fitting_batch_size(model, values.get("max_tokens", cls.max_tokens))
        config = cls(model, **values)
        parse_ks(config.pass_at, config.num_samples)
        if "seed" in set_options and "seeds" in set_options:
            raise UserError("--seed and --seeds exclude each other; name all seeds in --seeds")
        config.all_seeds()  # raises for invalid seeds
        return config

    def all_seeds(self) -> list[int]:
        """List the seeds to sample under: those of ``seeds`` if it is set, else the single ``seed``.

        Raises:
            UserError: ``seeds`` has fewer than two different seeds, or the sampling is greedy.
        """
        if self.seeds is None:
            return [self.seed]
        # A dict drops repeated seeds and keeps the order.
        distinct_seeds = list(dict.fromkeys(parse_seeds(self.seeds)))
        if len(distinct_seeds) < 2:
            raise UserError(f"--seeds {self.seeds}: a deviation needs two seeds or more; for one use --seed")
        if self.temperature == 0:
            raise UserError("--seeds: greedy responses are the same for every seed; set --temperature")
        return distinct_seeds

    @property
    def uses_vllm(self) -> bool:
        return self.generator == "vllm"

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters of the random answers."""
        return SamplingParams(
            max_new_tokens=self.max_tokens,
            temperature=self.temperature or 1.0,
            greedy=self.temperature == 0,
            top_p=self.top_p,
            stop_token_ids=self.stop_token_ids,
        )

    @property
    def problems_per_call(self) -> int:
        """Problems sampled per call: one batch, or more for vLLM, which fills its batches itself."""
        num_responses = max(self.batch_size, 1024) if self.uses_vllm else self.batch_size
        return max(1, num_responses // self.num_samples)

    def resolved(self, tokenizer: Any) -> Self:
        """Replace ``auto`` by the generator, device and dtype in use, and add the model's stop tokens."""
        device = vllm_device(self.device) if self.uses_vllm else self.device
        on_gpu = device != "cpu" and torch.cuda.is_available()
        if device == "cuda" and not on_gpu:
            raise UserError("--device cuda: no CUDA device here; use cpu or auto")
        generator = "vllm" if self.uses_vllm else choose(self.generator, self.model)
        dtype = self.dtype
        if dtype == "auto":
            dtype = "bfloat16" if on_gpu else "float32"
        return replace(
            self,
            generator=generator,
            device="cuda" if on_gpu else "cpu",
            dtype=dtype,
            stop_token_ids=(*end_tokens(self.model, tokenizer), *self.stop_token_ids),
        )

    def conditions(self) -> dict[str, Any]:
        """Return everything that a response depends on, except its problem and prompt, as JSON values.

        Call it on a resolved configuration. The device's name is included, because results differ in their
        last digits between devices and generators.
        """
        on_gpu = self.device == "cuda"
        return {
            "model": fingerprint(self.model),
            "generator": self.generator,
            "dtype": self.dtype,
            "device": torch.cuda.get_device_name() if on_gpu else f"cpu ({platform.machine()})",
            "sampling": asdict(self.sampling),
            "num_samples": self.num_samples,
            "seed": self.seed,
        }

    def build_generator(self, longest: int, max_images: int = 0) -> Sampler:
        """Build the generator of a resolved configuration.

        Args:
            longest: tokens of the longest prompt.
            max_images: largest number of images in a prompt.
        """
        if self.uses_vllm:
            check_sampling(self.sampling)  # before the model is loaded, which takes minutes
            return VLLMGenerator(
                self.model,
                self.dtype,
                max_model_len=longest + self.max_tokens,
                tensor_parallel_size=self.tensor_parallel,
                cache_bytes=None if self.cache_gib is None else int(self.cache_gib * (1 << 30)),
                max_images=max_images,
            )
        num_threads = self.num_threads
        if num_threads is None:
            num_threads = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        dtype = getattr(torch, self.dtype)
        generator = build_local(self.generator, self.model, dtype, self.device, self.batch_size)
        limit, limit_name, remedy = generator.context
        check_fits(longest, self.max_tokens, limit, limit_name, remedy)
        return generator


def describe(conditions: Mapping[str, Any], seeds: Sequence[int] = ()) -> str:
    """Describe conditions in words.

    Args:
        conditions: see `EvalConfig.conditions`.
        seeds: seeds of the results; with two or more, they replace the one in ``conditions``.
    """
    sampling = conditions["sampling"]
    choice = f"temperature {sampling['temperature']:g}, top_p {sampling['top_p']:g}"
    if sampling["greedy"]:
        choice = "greedy"
    seed_words = f"seed {conditions['seed']}"
    if len(seeds) > 1:
        seed_words = f"seeds {', '.join(map(str, seeds))}"
    parts = (
        f"{conditions['num_samples']} samples",
        choice,
        f"at most {sampling['max_new_tokens']} tokens",
        seed_words,
        f"{conditions['generator']} in {conditions['dtype']} on {conditions['device']}",
    )
    return ", ".join(parts)


def _recipe_values(recipe: Recipe) -> dict[str, Any]:
    """Return the fields that a recipe sets. Its evaluation section takes precedence over its training."""
    section = recipe.nemo_grpo
    generation = recipe.policy.generation
    training_values = {
        "section": section,
        "max_tokens": generation.max_new_tokens,
        "stop_token_ids": tuple(generation.stop_token_ids or ()),
        "generator": section.engine.generator,
        "dtype": recipe.policy.precision,
        "device": section.engine.device,
        "batch_size": recipe.policy.generation_batch_size,
        "num_threads": section.engine.num_threads,
    }
    evaluation_values = section.evaluation.given()
    # The recipe's number is for its own held-out problems, for which `load_benchmark` reads it. It must not
    # shorten a benchmark that comes from a file.
    del evaluation_values["num_problems"]
    return training_values | evaluation_values


CACHE_BYTES = 1 << 30
"""Bytes of KV cache for responses sampled together."""


def fitting_batch_size(model: Path, max_tokens: int) -> int:
    """Compute how many responses of this length have a float32 KV cache that fits into `CACHE_BYTES`.

    The result lies between 1 and the default batch size. Large models get small batches, so that their first
    responses are on disk early.
    """
    # A vision-language model keeps the sizes of its decoder in a section of its config.
    config = load_config(model).get_text_config()
    if not hasattr(config, "num_attention_heads"):
        return EvalConfig.batch_size  # a model without attention has no KV cache
    num_heads = getattr(config, "num_key_value_heads", None)
    if not num_heads:
        num_heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None)
    if not head_size:
        head_size = config.hidden_size // config.num_attention_heads
    # Keys and values, 4 bytes each.
    bytes_per_token = 2 * 4 * config.num_hidden_layers * num_heads * head_size
    return max(1, min(EvalConfig.batch_size, CACHE_BYTES // (bytes_per_token * max_tokens)))


def fingerprint(folder: Path) -> str:
    """Hash a model folder's content: equal for a copy, different after any edit."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    # In threads: hashlib releases the interpreter's lock, and a model has many gigabytes.
    with ThreadPoolExecutor() as pool:
        digests = list(pool.map(sha256_of, files))
    lines = [f"{path.name} {digest}" for path, digest in zip(files, digests, strict=True)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
