"""``nemo-grpo eval``: a Hugging Face model folder on a recipe's task."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nemo_grpo.errors import UserError

if TYPE_CHECKING:
    from nemo_grpo.engine.protocols import Generator
    from nemo_grpo.evaluate import EvalResult
    from nemo_grpo.recipe import Recipe
    from nemo_grpo.tasks import Problem

SUMMARY, SAMPLES = "summary.json", "samples.jsonl"
OPTION_KEYS = (
    "nemo_grpo.evaluation.num_samples",
    "nemo_grpo.evaluation.num_problems",
    "nemo_grpo.evaluation.temperature",
    "nemo_grpo.evaluation.top_p",
    "policy.generation.max_new_tokens",
)
"""The recipe keys that --k, --num-problems, --temperature, --top-p and --max-tokens stand for."""


def eval_command(
    model: Annotated[Path, typer.Option(help="Hugging Face folder: config, weights, tokenizer.")],
    recipe: Annotated[Path, typer.Option(help="Recipe whose task, prompt and evaluation settings are used.")],
    k: Annotated[int | None, typer.Option(help="Samples per problem. Default: the recipe's.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Of the samples. Default: the recipe's.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Of the samples. Default: the recipe's.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest response. Default: the recipe's.")] = None,
    num_problems: Annotated[int | None, typer.Option(help="Problems. Default: the recipe's.")] = None,
    seed: Annotated[int, typer.Option(help="Of the samples.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder of summary.json and samples.jsonl. Default: runs/eval-NAME.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace results in --out.")] = False,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Recipe overrides.", show_default=False),
    ] = None,
) -> None:
    """Evaluate a model folder on the recipe's held-out problems: greedy, avg@k, pass@k, maj@k.

    Example: nemo-grpo eval --model runs/quickstart/hf --recipe recipes/quickstart.yaml --k 16
    """
    from nemo_grpo.recipe import load_recipe

    options = dict(zip(OPTION_KEYS, (k, num_problems, temperature, top_p, max_tokens), strict=True))
    given = [f"{key}={value}" for key, value in options.items() if value is not None]
    loaded = load_recipe(recipe, [*(overrides or []), *given])
    out = out or Path(loaded.nemo_grpo.runs_dir) / f"eval-{model.resolve().name}"
    if (out / SUMMARY).exists() and not overwrite:
        raise UserError(f"{out / SUMMARY} exists; choose another --out, or --overwrite")
    tokenizer = _load_tokenizer(model)
    generator = _load_generator(model, loaded)
    problems = loaded.nemo_grpo.task.build().validation_problems(loaded.nemo_grpo.evaluation.num_problems)
    _check_place(out)
    result = _evaluate(loaded, generator, tokenizer, problems, seed)
    _write(result, model, out)
    _show(result, model, out)


def _check_place(out: Path) -> None:
    """Before the work: its results must not be lost for want of a place. Makes nothing yet."""
    existing = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"--out {out} cannot be made: {existing} cannot be written; choose another folder")


def _load_tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    if not model.is_dir():
        raise UserError(f"--model {model} is not a folder; give a Hugging Face model folder on this machine")
    known = ("tokenizer.json", "tokenizer.model", "vocab.json")
    if not any((model / name).is_file() for name in known):
        raise UserError(f"--model {model} has no tokenizer ({', '.join(known)}); save the tokenizer there")
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    if tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer in --model {model} has no end-of-sequence token; set eos_token")
    return tokenizer


def _load_generator(model: Path, recipe: Recipe) -> Generator:
    import torch

    from nemo_grpo.engine.generate_hf import HFGenerator

    torch.set_num_threads(recipe.nemo_grpo.engine.num_threads)
    device = recipe.nemo_grpo.engine.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, recipe.policy.precision)
    return HFGenerator(model, dtype, device, max_batch_size=recipe.policy.generation_batch_size)


def _evaluate(
    recipe: Recipe, generator: Generator, tokenizer: Any, problems: list[Problem], seed: int
) -> EvalResult:
    from nemo_grpo.engine.progress import progress
    from nemo_grpo.engine.protocols import SamplingParams
    from nemo_grpo.evaluate import evaluate

    section, generation = recipe.nemo_grpo, recipe.policy.generation
    sampling = SamplingParams(
        max_new_tokens=generation.max_new_tokens,
        temperature=section.evaluation.temperature or 1.0,
        greedy=section.evaluation.temperature == 0,
        top_p=section.evaluation.top_p,
        stop_token_ids=(tokenizer.eos_token_id, *(generation.stop_token_ids or ())),
    )
    with progress("evaluate", len(problems)) as advance:
        return evaluate(
            generator,
            tokenizer,
            section.task.build(),
            section.prompt,
            problems,
            num_samples=section.evaluation.num_samples,
            sampling=sampling,
            seed=seed,
            on_progress=advance,
        )


def _write(result: EvalResult, model: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    result.write_samples(out / SAMPLES)
    summary = {"model": str(model), **result.to_dict()}
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
        f"{len(result.problems)} problems x {result.num_samples} samples, temperature "
        f"{sampling.temperature:g}, top_p {sampling.top_p:g}, at most {sampling.max_new_tokens} tokens, "
        f"seed {result.seed}",
        highlight=False,
    )
    console.print(f"{out / SUMMARY}, {out / SAMPLES}", highlight=False, soft_wrap=True)
