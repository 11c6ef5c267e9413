"""``nemo-grpo eval``: a Hugging Face model folder on benchmarks, a recipe's own problems among them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Option

from nemo_grpo.cli.compare import parse_seeds
from nemo_grpo.cli.recipe import Overrides
from nemo_grpo.support.errors import UserError
from nemo_grpo.support.files import existing_parent
from nemo_grpo.support.model_card import Training, base_model
from nemo_grpo.support.model_folder import check_no_other_weights, hf_config, how_to_get

if TYPE_CHECKING:
    from nemo_grpo.evaluate.config import EvalConfig


NO_FIELDS = {"model", "recipe", "overrides", "pass_at", "seeds", "out", "overwrite", "check"}
"""Parameters of the command that `EvalConfig` lacks, or takes in another form."""


def eval_command(
    model: Annotated[Path, Option(help="Hugging Face folder: config, weights, tokenizer.")],
    recipe: Annotated[Path | None, Option(help="Recipe with the task, prompt and settings.")] = None,
    benchmarks: Annotated[str | None, Option(help="Data sets, JSONL files, recipe; with commas.")] = None,
    k: Annotated[int | None, Option(help="Samples per problem. Default: the recipe's, or 16.")] = None,
    temperature: Annotated[float | None, Option(help="0: greedy; else the recipe's, or 1.")] = None,
    top_p: Annotated[float | None, Option(help="Nucleus; else the recipe's, or 0.95.")] = None,
    max_tokens: Annotated[int | None, Option(help="Longest response; else the recipe's, or 2048.")] = None,
    num_problems: Annotated[int | None, Option(min=1, help="First ones; else the recipe's, or all.")] = None,
    data_dir: Annotated[Path, Option(help="Folder of `nemo-grpo data prepare`.")] = Path("data"),
    generator: Annotated[
        Literal["auto", "decoder", "hf", "vllm"] | None,
        Option(help="auto: the own decoder, or transformers (hf). Else the recipe's, or auto."),
    ] = None,
    prompt: Annotated[str | None, Option(help="A paper's, as gpg_7b; else the recipe's or task's.")] = None,
    protocol: Annotated[
        str | None, Option(help="A paper's: cw_grpo, erpo, tr_grpo, gpg, r1, qwen-math, greedy; options win.")
    ] = None,
    task: Annotated[str | None, Option(help="Task of JSONL files without manifest. Default: math.")] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"] | None,
        Option(help="auto: bfloat16 on a GPU, else float32. Else the recipe's, or auto."),
    ] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"] | None, Option(help="Else the recipe's, auto.")] = None,
    batch_size: Annotated[int | None, Option(min=1, help="Responses at a time; not for vllm.")] = None,
    tensor_parallel: Annotated[int, Option(help="GPUs that share the model, for vllm.", min=1)] = 1,
    cache_gib: Annotated[float | None, Option(min=0.01, help="GiB of vllm's KV cache.")] = None,
    pass_at: Annotated[str | None, Option(help="More k for pass@k, with commas, at most --k: 3,5.")] = None,
    seed: Annotated[int | None, Option(help="Seed of the samples. Default: 0.", min=0)] = None,
    seeds: Annotated[str | None, Option(help="Mean over how many seeds (4 is 0,1,2,3), or which.")] = None,
    out: Annotated[Path | None, Option(help="Folder of the results. Default: runs/eval-NAME.")] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace results in --out.")] = False,
    check: Annotated[bool, Option("--check", hidden=True)] = False,
    overrides: Overrides = None,
) -> None:
    """Evaluate a model folder: greedy, avg@k, pass@k, maj@k, with standard errors.

    Benchmarks are prepared data sets, JSONL files, and "recipe", which is the held-out problems of --recipe
    and the default. A recipe sets prompt, task parameters and settings, so that benchmarks are asked as in
    training; options override it. Killed? Repeat the command: responses already in --out are not sampled
    again.

    Examples:
      nemo-grpo eval --model MODEL --benchmarks aime24,math500 --k 16 --temperature 1 --top-p 0.95
      nemo-grpo eval --model MODEL --benchmarks aime24,math500 --protocol cw_grpo --generator vllm
      nemo-grpo eval --model MODEL --benchmarks aime24,amc23 --k 5 --pass-at 3 --seeds 4
      nemo-grpo eval --model runs/quickstart/hf --recipe recipes/quickstart.yaml --k 16
    """
    options = {name: value for name, value in locals().items() if name not in NO_FIELDS}
    if recipe is None and overrides:
        raise UserError(
            f"{overrides[0]} overrides a recipe's key, but there is no --recipe; add one, or use the options"
        )
    from nemo_grpo.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or []) if recipe else None

    from nemo_grpo.evaluate.benchmarks import load_benchmarks
    from nemo_grpo.evaluate.config import EvalConfig
    from nemo_grpo.evaluate.passk import parse_ks
    from nemo_grpo.evaluate.render import show
    from nemo_grpo.evaluate.suite import evaluate_seeds, longest_prompt

    if check:  # by slurm/pipeline.sh, before there is a model
        load_benchmarks(EvalConfig.of(model, loaded, {**options, "batch_size": 1}))
        return
    tokenizer = tokenizer_of(model)
    config = EvalConfig.of(model, loaded, options)
    config = replace(config, pass_at=parse_ks(pass_at, config.k))
    chosen = load_benchmarks(config)
    limit, vocab_size = model_limits(model)
    if protocol and max_tokens is None and limit is not None:  # room after the longest prompt
        left = limit - longest_prompt(chosen, tokenizer, model, 0, None, vocab_size)
        config = replace(config, max_tokens=max(1, min(config.max_tokens, left)))
    out = out or Path(loaded.nemo_grpo.runs_dir if loaded else "runs") / f"eval-{result_name(model)}"
    check_place(out)
    folders = {config.seed: out} if seeds is None else _seed_folders(seeds, seed, config, out)
    longest = longest_prompt(chosen, tokenizer, model, config.max_tokens, limit, vocab_size)
    with finite_logits(model):
        results = evaluate_seeds(config, tokenizer, chosen, folders, out, longest, overwrite=overwrite)
    summaries = {number: result.write(folders[number], model) for number, result in results.items()}
    show(next(iter(results.values())), summaries, model, out)


def _seed_folders(seeds: str, seed: int | None, config: EvalConfig, out: Path) -> dict[int, Path]:
    if seed is not None:
        raise UserError("--seed and --seeds exclude each other; name all seeds in --seeds")
    numbers = list(dict.fromkeys(parse_seeds(seeds)))
    if len(numbers) < 2:
        raise UserError(f"--seeds {seeds}: a deviation needs two seeds or more; for one use --seed")
    if config.temperature == 0:
        raise UserError("--seeds: greedy responses are the same for every seed; set --temperature")
    return {number: out / f"seed-{number}" for number in numbers}


@contextmanager
def finite_logits(model: Path) -> Iterator[None]:
    """Raise UserError if sampling from the model meets NaN or inf."""
    try:
        yield
    except FloatingPointError as error:
        raise UserError(f"--model {model}: {error}; use another checkpoint or dtype") from error


def result_name(model: Path) -> str:
    """Return the folder's name, or the run's for a run's folder hf, a name that every run has."""
    folder = model.resolve()
    return folder.parent.name if folder.name == "hf" and folder.parent.name else folder.name


def check_place(out: Path) -> None:
    """Check before the work that results can be written; creates nothing yet."""
    existing = existing_parent(out)
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"--out {out} cannot be made: {existing} cannot be written; choose another folder")


def tokenizer_of(model: Path) -> Any:
    """Load the model's tokenizer; refuses one without an end of sequence, and adapters beside the model."""
    from nemo_grpo.run.recipe_checks import reason_against_model
    from nemo_grpo.support.hf_folder import load_tokenizer

    if not model.is_dir():
        raise UserError(f"--model {model} is not a folder; {how_to_get(model)}")
    if reason := reason_against_model(model):
        raise UserError(f"--model {model} {reason}")
    known = ("tokenizer.json", "tokenizer.model", "vocab.json")
    if not any((model / name).is_file() for name in known):
        raise UserError(f"--model {model} has no tokenizer ({', '.join(known)}); {_remedy(model)}")
    tokenizer = load_tokenizer(model)
    if tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer in --model {model} has no end-of-sequence token; set eos_token")
    if (model / "config.json").is_file():
        check_no_other_weights(model, hf_config(model))
    return tokenizer


def _remedy(model: Path) -> str:
    name, known = base_model(Training(), model)
    if "base_model" in known:
        load = f"AutoTokenizer.from_pretrained({name!r})"
        return f"{load}.save_pretrained({str(model)!r}) puts its base's there"
    return "put the tokenizer of its base model there, the one of --hf-config if it was converted"


def model_limits(model: Path) -> tuple[int | None, int | None]:
    """Read the model's longest sequence and vocabulary; None if its config does not say."""
    config = hf_config(model) if (model / "config.json").is_file() else {}
    text = {**config, **config.get("text_config", {})}  # a vision-language model's language model
    return text.get("max_position_embeddings"), text.get("vocab_size")
