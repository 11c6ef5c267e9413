"""``nemo-grpo eval``: a Hugging Face model folder on a recipe's task, or on benchmarks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from nemo_grpo.cli.eval_benchmarks import (
    RESPONSES_PER_CALL,
    Lazy,
    Order,
    describe,
    evaluate_benchmarks,
    vllm_generator,
)
from nemo_grpo.cli.model_folder import check_place, finite_logits, model_limits, result_name, tokenizer_of
from nemo_grpo.errors import UserError

if TYPE_CHECKING:
    from nemo_grpo.engine.protocols import Generator
    from nemo_grpo.evaluate import EvalResult
    from nemo_grpo.evaluate.suite import Conditions
    from nemo_grpo.recipe import Recipe
    from nemo_grpo.tasks import Problem, Task

SUMMARY, SAMPLES = "summary.json", "samples.jsonl"
OPTION_KEYS = (
    "nemo_grpo.evaluation.num_samples",
    "nemo_grpo.evaluation.num_problems",
    "nemo_grpo.evaluation.temperature",
    "nemo_grpo.evaluation.top_p",
    "policy.generation.max_new_tokens",
)
"""The recipe keys that --k, --num-problems, --temperature, --top-p and --max-tokens stand for."""


Model = Annotated[Path, typer.Option(help="Hugging Face folder: config, weights, tokenizer.")]
RecipeOption = Annotated[
    Path | None,
    typer.Option(help="Recipe whose task, prompt and evaluation settings are used.", show_default=False),
]
Benchmarks = Annotated[
    str | None,
    typer.Option(
        help="Prepared data sets and JSONL files, comma-separated: aime24,math500,my.jsonl.",
        show_default=False,
    ),
]
K = Annotated[int | None, typer.Option(help="Samples per problem. Default: the recipe's, or 16.")]
Temperature = Annotated[float | None, typer.Option(help="Of the samples. Default: the recipe's, or 1.")]
TopP = Annotated[float | None, typer.Option(help="Of the samples. Default: the recipe's, or 0.95.")]
MaxTokens = Annotated[int | None, typer.Option(help="Longest response. Default: the recipe's, or 2048.")]
NumProblems = Annotated[
    int | None, typer.Option(help="First so many problems. Default: the recipe's, or all.", min=1)
]
Seed = Annotated[int, typer.Option(help="Of the samples.", min=0)]
Out = Annotated[Path | None, typer.Option(help="Folder of the results. Default: runs/eval-NAME.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace results in --out.")]
DataDir = Annotated[Path, typer.Option(help="Folder of `nemo-grpo data prepare`.")]
GeneratorName = Annotated[
    Literal["auto", "decoder", "hf", "vllm"],
    typer.Option(
        help="What samples: own decoder, transformers (hf) or vLLM; auto: decoder if it knows the model."
    ),
]
PromptName = Annotated[
    str | None, typer.Option(help="A paper's prompt, such as gpg_7b. Default: the recipe's, or the task's.")
]
TaskName = Annotated[str | None, typer.Option(help="Task of JSONL files without manifest. Default: math.")]
DType = Annotated[Literal["auto", "float32", "bfloat16", "float16"], typer.Option(help="Of the weights.")]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where.")]
BatchSize = Annotated[int, typer.Option(help="Responses sampled together; not for vllm.", min=1)]
BATCH_SIZE = 256
TensorParallel = Annotated[int, typer.Option(help="GPUs that share the model, for vllm.", min=1)]
CacheGib = Annotated[
    float | None,
    typer.Option(
        help="Memory of vllm's keys and values, GiB. Default: 90 % of each GPU less the weights; 1 on a CPU.",
        min=0.01,
        show_default=False,
    ),
]


def eval_command(
    model: Model,
    recipe: RecipeOption = None,
    benchmarks: Benchmarks = None,
    k: K = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    max_tokens: MaxTokens = None,
    num_problems: NumProblems = None,
    data_dir: DataDir = Path("data"),
    generator: GeneratorName = "auto",
    prompt: PromptName = None,
    task: TaskName = None,
    dtype: DType = "auto",
    device: Device = "auto",
    batch_size: BatchSize = BATCH_SIZE,
    tensor_parallel: TensorParallel = 1,
    cache_gib: CacheGib = None,
    seed: Seed = 0,
    out: Out = None,
    overwrite: Overwrite = False,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Recipe overrides.", show_default=False),
    ] = None,
) -> None:
    """Evaluate a model folder: greedy, avg@k, pass@k, maj@k, with standard errors.

    Either on benchmarks, or on the held-out problems of a recipe's task. With both, the recipe gives prompt
    and task parameters, so that benchmarks are asked as in training. Killed? Repeat the command:
    responses that are in --out already are not sampled again.

    Examples:

      nemo-grpo eval --model MODEL --benchmarks aime24,math500 --k 16 --temperature 1 --top-p 0.95

      nemo-grpo eval --model runs/quickstart/hf --recipe recipes/quickstart.yaml --k 16
    """
    options = dict(zip(OPTION_KEYS, (k, num_problems, temperature, top_p, max_tokens), strict=True))
    given = [f"{key}={value}" for key, value in options.items() if value is not None]
    if recipe is None and overrides:
        raise UserError(
            f"{overrides[0]} overrides a recipe's key, and there is no --recipe; add one, or use the options"
        )
    loaded = _load_recipe(recipe, [*(overrides or []), *given])
    out = out or Path(loaded.nemo_grpo.runs_dir if loaded else "runs") / f"eval-{result_name(model)}"
    if benchmarks is not None:
        order = Order(
            model, benchmarks, data_dir, out, generator, k, temperature, top_p, max_tokens, num_problems,
            prompt, task, dtype, device, batch_size, tensor_parallel, cache_gib, seed, overwrite, loaded,
        )  # fmt: skip
        tokenizer = tokenizer_of(model)
        check_place(out)
        with finite_logits(model):
            evaluate_benchmarks(order, tokenizer)
        return
    if loaded is None:
        raise UserError("nemo-grpo eval needs --benchmarks, --recipe, or both")
    _refuse({
        "--generator": generator != "auto",
        "--prompt": prompt is not None,
        "--task": task is not None,
        "--dtype": dtype != "auto",
        "--device": device != "auto",
        "--batch-size": batch_size != BATCH_SIZE,
        "--tensor-parallel": tensor_parallel != 1,
        "--cache-gib": cache_gib is not None,
    })  # fmt: skip
    with finite_logits(model):
        _evaluate_recipe(loaded, model, out, seed, overwrite)


def _refuse(given: dict[str, bool]) -> None:
    """Raises UserError if options are given that mean nothing for a recipe's own problems."""
    ignored = [option for option, is_given in given.items() if is_given]
    if ignored:
        raise UserError(
            f"{', '.join(ignored)}: only with --benchmarks; for a recipe's own problems set its keys "
            "(nemo_grpo.prompt, nemo_grpo.task, policy.precision, nemo_grpo.engine.device, "
            "nemo_grpo.engine.generator, policy.generation_batch_size)"
        )


def _load_recipe(path: Path | None, overrides: list[str]) -> Recipe | None:
    if path is None:
        return None
    from nemo_grpo.recipe import load_recipe

    return load_recipe(path, overrides)


def _evaluate_recipe(recipe: Recipe, model: Path, out: Path, seed: int, overwrite: bool) -> None:
    from nemo_grpo.evaluate.responses import problems_digest
    from nemo_grpo.evaluate.suite import RESPONSES, longest_prompt

    tokenizer, section = tokenizer_of(model), recipe.nemo_grpo
    conditions = _conditions(recipe, tokenizer, seed, model)
    task = section.task.build()
    problems = task.validation_problems(section.evaluation.num_problems)
    described = {
        **conditions.to_dict(),
        "task": section.task.model_dump(mode="json"),
        "prompt": section.prompt.model_dump(mode="json"),
    }
    if not overwrite:
        _check_results(out, described, problems)
    max_tokens = conditions.sampling.max_new_tokens
    longest = longest_prompt([(section.prompt, problems)], tokenizer, max_tokens, *model_limits(model))
    generator = Lazy(lambda: _load_generator(model, recipe, conditions, longest))
    if not (out / RESPONSES).exists():
        generator.load()  # what is wrong with the model is said before anything is made
    check_place(out)
    result = _evaluate(recipe, task, generator, tokenizer, problems, conditions, out)
    _write(result, model, out, {**described, "problems": problems_digest(problems)})
    _show(result, model, out)


def _check_results(out: Path, described: dict[str, Any], problems: list[Problem]) -> None:
    """Results of other conditions or problems stay unless asked otherwise; more problems may follow them."""
    from nemo_grpo.evaluate.responses import problems_digest
    from nemo_grpo.evaluate.summary import check_number, check_summary, read_summary

    num_before = (read_summary(out) or {}).get("num_problems", len(problems))
    check_number(out, num_before, len(problems))
    described = {**described, "problems": problems_digest(problems[:num_before])}
    check_summary(out, described, of_benchmarks=False)


def _conditions(recipe: Recipe, tokenizer: Any, seed: int, model: Path) -> Conditions:
    import torch

    from nemo_grpo.engine.generators import choose
    from nemo_grpo.engine.protocols import SamplingParams
    from nemo_grpo.evaluate.responses import fingerprint
    from nemo_grpo.evaluate.suite import Conditions

    evaluation, generation = recipe.nemo_grpo.evaluation, recipe.policy.generation
    sampling = SamplingParams(
        max_new_tokens=generation.max_new_tokens,
        temperature=evaluation.temperature or 1.0,
        greedy=evaluation.temperature == 0,
        top_p=evaluation.top_p,
        stop_token_ids=(tokenizer.eos_token_id, *(generation.stop_token_ids or ())),
    )
    engine = recipe.nemo_grpo.engine
    if engine.generator == "vllm":
        from nemo_grpo.engine.generate_vllm import vllm_device

        chosen, device = "vllm", vllm_device(engine.device)
    else:
        chosen, device = choose(engine.generator, model), engine.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = recipe.policy.precision
    return Conditions(fingerprint(model), chosen, dtype, device, sampling, evaluation.num_samples, seed)


def _load_generator(model: Path, recipe: Recipe, conditions: Conditions, longest: int) -> Generator:
    import torch

    if conditions.generator == "vllm":
        return vllm_generator(model, conditions, longest)

    from nemo_grpo.engine.generators import build_local

    torch.set_num_threads(recipe.nemo_grpo.engine.num_threads)
    name, device, dtype = conditions.generator, conditions.device, getattr(torch, conditions.dtype)
    return build_local(name, model, dtype, device, recipe.policy.generation_batch_size)


def _evaluate(
    recipe: Recipe,
    task: Task,
    generator: Generator,
    tokenizer: Any,
    problems: list[Problem],
    conditions: Conditions,
    out: Path,
) -> EvalResult:
    from nemo_grpo.engine.progress import progress
    from nemo_grpo.evaluate import evaluate
    from nemo_grpo.evaluate.responses import ResponseLog, Resumable
    from nemo_grpo.evaluate.suite import RESPONSES, tool_conditions

    section, k = recipe.nemo_grpo, conditions.num_samples
    per_call = max(recipe.policy.generation_batch_size, RESPONSES_PER_CALL[conditions.generator])
    with ResponseLog(out / RESPONSES) as log, progress("evaluate", len(problems)) as advance:
        return evaluate(
            generator,
            tokenizer,
            task,
            section.prompt,
            problems,
            num_samples=k,
            sampling=conditions.sampling,
            seed=conditions.seed,
            on_progress=advance,
            recall=Resumable(log, section.task.name, {**conditions.to_dict(), **tool_conditions(task)}),
            problems_per_call=max(1, per_call // k),
        )


def _write(result: EvalResult, model: Path, out: Path, conditions: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    result.write_samples(out / SAMPLES)
    summary = {"model": str(model), "conditions": conditions, **result.to_dict()}
    (out / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def _show(result: EvalResult, model: Path, out: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    metrics = result.metrics()
    sampling = result.sampling
    table = Table()
    table.add_column("metric")
    table.add_column("value", justify="right")
    table.add_column("stderr", justify="right")
    for name, value in metrics.items():
        if name.endswith("_stderr"):
            continue
        stderr = metrics.get(f"{name}_stderr")
        label = f"accuracy = avg@{result.num_samples}" if name == "accuracy" else name
        number = f"{value:.1f}" if name == "num_tokens" else f"{value:.3f}"
        table.add_row(label, number, "" if stderr is None else f"{stderr:.3f}")
    console = Console()
    console.print(f"{model} on {result.task['name']}", highlight=False, soft_wrap=True)
    console.print(table)
    console.print(
        f"{len(result.problems)} problems x {result.num_samples} samples, "
        f"{describe(sampling)}, at most {sampling.max_new_tokens} tokens, "
        f"seed {result.seed}",
        highlight=False,
    )
    console.print(f"{out / SUMMARY}, {out / SAMPLES}", highlight=False, soft_wrap=True)
