"""Configuration of an evaluation: model, benchmarks, sampling, generator and device."""

import hashlib
import platform
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
import yaml

from nemo_grpo.evaluate.passk import parse_ks
from nemo_grpo.recipe import Recipe
from nemo_grpo.recipe.own import NemoGRPOSection
from nemo_grpo.sampling.generate_vllm import VLLMGenerator, check_sampling, vllm_device
from nemo_grpo.sampling.generators import build_local, choose
from nemo_grpo.sampling.requests import Sampler, SamplingParams, check_fits
from nemo_grpo.support.errors import UserError, did_you_mean
from nemo_grpo.support.files import sha256_of
from nemo_grpo.support.hf_folder import end_tokens, load_config
from nemo_grpo.support.sections import EvalOptions, parse_seeds

PROTOCOLS: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("protocols.yaml").read_text())
"""Papers' evaluations by name: fields of `EvalConfig` with the source of their values."""


@dataclass(frozen=True)
class EvalConfig:
    """Settings from the command line, a recipe and a protocol. The defaults are ERPO's (A.3).

    The fields of `EvalOptions` have their meaning; None stays where a set, a model or a recipe decides.

    Attributes:
        presets: benchmark or task -> preset, if neither a recipe nor ``prompt`` is given.
        section: a recipe's section ``nemo_grpo``, with its task and prompt.
        source: of the values of ``protocol``, a key of `PROTOCOLS`.
        stop_token_ids: in addition to the model's own, `end_tokens`.
        num_threads: on a CPU; None: torch's default.
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

        Raises: UserError: an unknown protocol, or numbers that exclude each other.
        """
        given = options.given()
        values = _of_recipe(recipe) if recipe else {}
        if options.seed is not None and options.seeds is None:
            values.pop("seeds", None)  # one seed in place of the recipe's several
        name = given.get("protocol", values.get("protocol"))
        if name is not None:
            if name not in PROTOCOLS:
                raise UserError(f"--protocol {name} is unknown{did_you_mean(name, PROTOCOLS)}")
            values |= PROTOCOLS[name]
        values |= given
        if "batch_size" not in values:
            values["batch_size"] = fitting_batch_size(model, values.get("max_tokens", cls.max_tokens))
        config = cls(model, **values)
        parse_ks(config.pass_at, config.num_samples)
        if "seed" in given and "seeds" in given:
            raise UserError("--seed and --seeds exclude each other; name all seeds in --seeds")
        config.all_seeds()
        return config

    def all_seeds(self) -> list[int]:
        """List the seeds of the samples: of ``seeds``, at least two, else ``seed``."""
        if self.seeds is None:
            return [self.seed]
        numbers = list(dict.fromkeys(parse_seeds(self.seeds)))
        if len(numbers) < 2:
            raise UserError(f"--seeds {self.seeds}: a deviation needs two seeds or more; for one use --seed")
        if self.temperature == 0:
            raise UserError("--seeds: greedy responses are the same for every seed; set --temperature")
        return numbers

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
        at_once = max(self.batch_size, 1024) if self.uses_vllm else self.batch_size
        return max(1, at_once // self.num_samples)

    def resolved(self, tokenizer: Any) -> Self:
        """Replace ``auto`` by the generator, device and dtype in use, and add the model's stop tokens."""
        device = vllm_device(self.device) if self.uses_vllm else self.device
        on_gpu = device != "cpu" and torch.cuda.is_available()
        if device == "cuda" and not on_gpu:
            raise UserError("--device cuda: no CUDA device here; use cpu or auto")
        return replace(
            self,
            generator="vllm" if self.uses_vllm else choose(self.generator, self.model),
            device="cuda" if on_gpu else "cpu",
            dtype=self.dtype if self.dtype != "auto" else "bfloat16" if on_gpu else "float32",
            stop_token_ids=(*end_tokens(self.model, tokenizer), *self.stop_token_ids),
        )

    def conditions(self) -> dict[str, Any]:
        """Return all that a response depends on besides its problem, for a resolved configuration.

        The device's name is included: results differ in the last digits between devices and generators.
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

        Args: longest: tokens of the longest prompt.  max_images: most images in a prompt.
        """
        if self.uses_vllm:
            check_sampling(self.sampling)  # before the model is loaded
            return VLLMGenerator(
                self.model,
                self.dtype,
                max_model_len=longest + self.max_tokens,
                tensor_parallel_size=self.tensor_parallel,
                cache_bytes=None if self.cache_gib is None else int(self.cache_gib * (1 << 30)),
                max_images=max_images,
            )
        torch.set_num_threads(self.num_threads or torch.get_num_threads())
        dtype = getattr(torch, self.dtype)
        generator = build_local(self.generator, self.model, dtype, self.device, self.batch_size)
        check_fits(longest, self.max_tokens, *generator.context)
        return generator


def describe(conditions: Mapping[str, Any], seeds: Sequence[int] = ()) -> str:
    """Describe conditions in words.  Args: seeds: of several results under them."""
    c, sampling = conditions, conditions["sampling"]
    seeded = f"seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else f"seed {c['seed']}"
    drawn = f"temperature {sampling['temperature']:g}, top_p {sampling['top_p']:g}"
    return (
        f"{c['num_samples']} samples, {'greedy' if sampling['greedy'] else drawn}, at most "
        f"{sampling['max_new_tokens']} tokens, {seeded}, {c['generator']} in {c['dtype']} on {c['device']}"
    )


def _of_recipe(recipe: Recipe) -> dict[str, Any]:
    section, generation = recipe.nemo_grpo, recipe.policy.generation
    of_training = {
        "section": section,
        "max_tokens": generation.max_new_tokens,
        "stop_token_ids": tuple(generation.stop_token_ids or ()),
        "generator": section.engine.generator,
        "dtype": recipe.policy.precision,
        "device": section.engine.device,
        "batch_size": recipe.policy.generation_batch_size,
        "num_threads": section.engine.num_threads,
    }
    evaluation = section.evaluation.given()
    del evaluation[
        "num_problems"
    ]  # counts the task's own problems, which `load_benchmark` reads; not a file's
    return of_training | evaluation


CACHE_BYTES = 1 << 30
"""Bytes of KV cache for responses sampled together."""


def fitting_batch_size(model: Path, max_tokens: int) -> int:
    """Count responses of this length whose KV cache fits `CACHE_BYTES` in float32, from 1 to the default.

    A large model then gets small batches, whose answers are on disk early.
    """
    config = load_config(model).get_text_config()  # of a model with images, its decoder's
    if not hasattr(config, "num_attention_heads"):  # without attention there is no such cache
        return EvalConfig.batch_size
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_response = 2 * 4 * config.num_hidden_layers * heads * width * max_tokens
    return max(1, min(EvalConfig.batch_size, CACHE_BYTES // per_response))


def fingerprint(folder: Path) -> str:
    """Hash a model folder's content: equal for a copy, different after any edit."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    with ThreadPoolExecutor() as pool:
        lines = [
            f"{path.name} {digest}" for path, digest in zip(files, pool.map(sha256_of, files), strict=True)
        ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
