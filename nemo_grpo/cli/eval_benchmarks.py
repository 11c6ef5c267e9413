"""``nemo-grpo eval --benchmarks``: a model folder on prepared benchmarks or JSONL files."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nemo_grpo.cli.model_folder import model_limits
from nemo_grpo.errors import UserError

if TYPE_CHECKING:
    from nemo_grpo.engine.protocols import Generator, Rollout, SamplingParams
    from nemo_grpo.evaluate.benchmarks import Benchmark
    from nemo_grpo.evaluate.suite import Conditions, SuiteResult
    from nemo_grpo.recipe import Recipe

ERPO_DEFAULTS = {"k": 16, "temperature": 1.0, "top_p": 0.95, "max_tokens": 2048}
"""ERPO A.3."""
RESPONSES_PER_CALL = {"decoder": 1, "hf": 1, "vllm": 1024}
"""vLLM fills its batches itself; the others get one batch, so that little is lost by a kill."""
PICTURE = "scores.png"


@dataclass(frozen=True)
class Order:
    """The command's options."""

    model: Path
    benchmarks: str
    data_dir: Path
    out: Path
    generator: Literal["auto", "decoder", "hf", "vllm"]
    k: int | None
    temperature: float | None
    top_p: float | None
    max_tokens: int | None
    num_problems: int | None
    prompt: str | None
    task: str | None
    dtype: str
    device: str
    batch_size: int
    tensor_parallel: int
    cache_gib: float | None
    seed: int
    overwrite: bool
    recipe: Recipe | None


def evaluate_benchmarks(order: Order, tokenizer: Any) -> None:
    """Evaluate, write, show. Raises: UserError: before anything is loaded or written, where possible."""
    from nemo_grpo.engine.progress import progress
    from nemo_grpo.evaluate.responses import ResponseLog
    from nemo_grpo.evaluate.suite import RESPONSES, longest_prompt, run_suite

    benchmarks = _load(order)
    conditions = _conditions(order, tokenizer)
    asked = [(benchmark.prompt, benchmark.problems) for benchmark in benchmarks]
    max_tokens = conditions.sampling.max_new_tokens
    longest = longest_prompt(asked, tokenizer, max_tokens, *model_limits(order.model))
    _check_results(order, conditions, benchmarks)
    generator = Lazy(lambda: _generator(order, conditions, longest))
    if not (order.out / RESPONSES).exists():
        generator.load()  # what is wrong with the model is said before anything is made
    per_call = max(order.batch_size, RESPONSES_PER_CALL[conditions.generator]) // conditions.num_samples
    total = sum(len(benchmark.problems) for benchmark in benchmarks)
    with ResponseLog(order.out / RESPONSES) as log, progress("evaluate", total) as advance:
        result = run_suite(
            generator,
            tokenizer,
            benchmarks,
            conditions,
            log,
            problems_per_call=max(1, per_call),
            on_progress=advance,
        )
    _finish(order, result)


def describe(sampling: SamplingParams) -> str:
    """How responses are drawn, in words."""
    if sampling.greedy:
        return "greedy"
    return f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}"


def _load(order: Order) -> list[Benchmark]:
    from nemo_grpo.evaluate.benchmarks import Choice, load_benchmark

    section = order.recipe.nemo_grpo if order.recipe else None
    choice = Choice(
        data_dir=order.data_dir,
        limit=order.num_problems,
        task=order.task,
        preset=order.prompt,
        recipe_task=section.task if section else None,
        recipe_prompt=section.prompt if section else None,
    )
    items = [item.strip() for item in order.benchmarks.split(",") if item.strip()]
    loaded = [load_benchmark(item, choice) for item in items]
    names = [benchmark.name for benchmark in loaded]
    if not names or len(set(names)) < len(names):
        raise UserError(
            f"--benchmarks {order.benchmarks}: name one or several, each once and by another name"
        )
    return loaded


def _conditions(order: Order, tokenizer: Any) -> Conditions:
    from nemo_grpo.engine.protocols import SamplingParams
    from nemo_grpo.evaluate.responses import fingerprint
    from nemo_grpo.evaluate.suite import Conditions

    asked = {name: getattr(order, name) for name in ERPO_DEFAULTS}
    defaults = ERPO_DEFAULTS if order.recipe is None else _recipe_defaults(order.recipe)
    values = {name: defaults[name] if value is None else value for name, value in asked.items()}
    if values["k"] < 1:
        raise UserError(f"--k {values['k']} must be at least 1")
    temperature = values["temperature"]
    sampling = SamplingParams(
        max_new_tokens=int(values["max_tokens"]),
        temperature=temperature or 1.0,
        greedy=temperature == 0,
        top_p=values["top_p"],
        stop_token_ids=(tokenizer.eos_token_id, *_more_stop_tokens(order.recipe)),
    )
    device, dtype = _place(order)
    return Conditions(
        fingerprint(order.model), _chosen(order), dtype, device, sampling, int(values["k"]), order.seed
    )


def _chosen(order: Order) -> str:
    """The generator by its name, as results differ between them in the last digits."""
    if order.generator == "vllm":
        return "vllm"
    from nemo_grpo.engine.generators import choose

    return choose(order.generator, order.model)


def _more_stop_tokens(recipe: Recipe | None) -> list[int]:
    return list(recipe.policy.generation.stop_token_ids or ()) if recipe is not None else []


def _recipe_defaults(recipe: Recipe) -> dict[str, float]:
    evaluation = recipe.nemo_grpo.evaluation
    return {
        "k": evaluation.num_samples,
        "temperature": evaluation.temperature,
        "top_p": evaluation.top_p,
        "max_tokens": recipe.policy.generation.max_new_tokens,
    }


def _place(order: Order) -> tuple[str, str]:
    """Device by its name, as results differ between kinds; dtype."""
    import torch

    device = order.device
    if order.generator == "vllm":
        from nemo_grpo.engine.generate_vllm import vllm_device

        device = vllm_device(device)
    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.get_device_name(), order.dtype if order.dtype != "auto" else "bfloat16"
    if device == "cuda":
        raise UserError("--device cuda: no CUDA device here; use cpu or auto")
    return f"cpu ({platform.machine()})", order.dtype if order.dtype != "auto" else "float32"


def _check_results(order: Order, conditions: Conditions, benchmarks: Sequence[Benchmark]) -> None:
    """Results of other conditions stay unless asked otherwise."""
    from nemo_grpo.evaluate.summary import check_entries, check_summary

    if not order.overwrite:
        check_summary(order.out, conditions.to_dict(), of_benchmarks=True)
        check_entries(order.out, {b.name: (len(b.problems), b.identity()) for b in benchmarks})


class Lazy:
    """Loads the model when the first response is needed: not at all where all are known."""

    def __init__(self, build: Callable[[], Generator]) -> None:
        self._build = build
        self._built: Generator | None = None

    def load(self) -> Generator:
        """The model, loaded if it is not yet."""
        self._built = self._built or self._build()
        return self._built

    def generate(self, *arguments: Any, **options: Any) -> Rollout:
        """See `Generator.generate`."""
        return self.load().generate(*arguments, **options)


def _generator(order: Order, conditions: Conditions, longest: int) -> Generator:
    import torch

    if order.generator == "vllm":
        return vllm_generator(order.model, conditions, longest, order.tensor_parallel, order.cache_gib)
    from nemo_grpo.engine.generators import build_local

    cpu = conditions.device.startswith("cpu")
    torch.set_num_threads(
        order.recipe.nemo_grpo.engine.num_threads if order.recipe else torch.get_num_threads()
    )
    name, dtype = conditions.generator, getattr(torch, conditions.dtype)
    return build_local(name, order.model, dtype, "cpu" if cpu else "cuda", order.batch_size)


def vllm_generator(
    model: Path,
    conditions: Conditions,
    longest: int,
    tensor_parallel: int = 1,
    cache_gib: float | None = None,
) -> Generator:
    """Args: longest: tokens of the longest prompt."""
    from nemo_grpo.engine.generate_vllm import VLLMGenerator, check_sampling

    check_sampling(conditions.sampling)  # loading takes longer
    return VLLMGenerator(
        model,
        conditions.dtype,
        max_model_len=longest + conditions.sampling.max_new_tokens,
        tensor_parallel_size=tensor_parallel,
        cache_bytes=None if cache_gib is None else int(cache_gib * (1 << 30)),
    )


def _finish(order: Order, result: SuiteResult) -> None:
    from rich.console import Console

    from nemo_grpo.evaluate.show import groups, plot, table
    from nemo_grpo.evaluate.summary import BENCHMARKS, SUMMARY

    conditions = result.conditions
    sampling = conditions.sampling
    described = (
        f"{conditions.num_samples} samples, {describe(sampling)}, "
        f"at most {sampling.max_new_tokens} tokens, seed {conditions.seed}, {conditions.generator} in "
        f"{conditions.dtype} on {conditions.device}"
    )
    summary = result.write(order.out, order.model)
    plot(summary, order.out / PICTURE, f"{order.model.resolve().name}: {described}")
    prompts = ", ".join(f"{name}: {entry['prompt']}" for name, entry in summary[BENCHMARKS].items())
    console = Console()
    console.print(f"{order.model}; per cent +- standard error over problems", highlight=False, soft_wrap=True)
    console.print(table(summary))
    for line in groups(summary):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(f"{described}; prompts {prompts}", highlight=False)
    console.print(f"{order.out / SUMMARY}, {order.out / PICTURE}", highlight=False, soft_wrap=True)
