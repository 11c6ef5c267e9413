"""``nemo-grpo eval``: a Hugging Face model folder on benchmarks, a recipe's own problems among them."""

from __future__ import annotations

import inspect
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any

from pydantic import ValidationError
from typer import Option

from nemo_grpo.cli.recipe import Overrides
from nemo_grpo.support.errors import UserError
from nemo_grpo.support.sections import EvalOptions


def eval_command(
    model: Annotated[Path, Option(help="Hugging Face folder with config.json, weights and tokenizer.")],
    recipe: Annotated[
        Path | None, Option(help="Recipe that gives the task, the prompt and the settings.")
    ] = None,
    out: Annotated[Path | None, Option(help="Folder of the results. The default is runs/eval-NAME.")] = None,
    overwrite: Annotated[
        bool, Option("--overwrite", help="Replace results in --out that other settings made.")
    ] = False,
    check: Annotated[bool, Option("--check", hidden=True)] = False,
    overrides: Overrides = None,
    **options: Any,
) -> None:
    """Evaluate a model on benchmarks: greedy, avg@k, pass@k and maj@k, with standard errors.

    A benchmark is a prepared data set, a JSONL file, or "recipe", which means the held-out problems of
    --recipe. That is the default. With --recipe, all benchmarks get its prompt, its task's parameters and its
    settings. Options override the recipe.

    If the command is killed, repeat it. Responses that are in --out are not sampled again.

    Examples:
      nemo-grpo eval --model MODEL --benchmarks aime24,math500 --k 16 --temperature 1 --top-p 0.95
      nemo-grpo eval --model MODEL --benchmarks aime24,math500 --protocol cw_grpo --generator vllm
      nemo-grpo eval --model MODEL --benchmarks aime24,amc23 --k 5 --pass-at 3 --seeds 4
      nemo-grpo eval --model runs/quickstart/hf --recipe recipes/quickstart.yaml --k 16
    """
    if recipe is None and overrides:
        raise UserError(
            f"{overrides[0]} overrides a recipe's key, but there is no --recipe; add one, or use the options"
        )
    eval_options = options_of(options)
    from nemo_grpo.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or []) if recipe else None

    from nemo_grpo.evaluate import evaluate
    from nemo_grpo.evaluate.benchmarks import load_benchmarks
    from nemo_grpo.evaluate.config import EvalConfig
    from nemo_grpo.evaluate.render import show
    from nemo_grpo.run.recipe_checks import reason_against_model

    if check:
        # slurm/pipeline.sh checks before the model exists. Its size would decide the batch size, so set any.
        any_batch = eval_options.model_copy(update={"batch_size": 1})
        load_benchmarks(EvalConfig.of(model, any_batch, loaded))
        return
    reason = reason_against_model(model) if model.is_dir() else None
    if reason:
        raise UserError(f"--model {model} {reason}")
    evaluation = evaluate(model, eval_options, loaded, out, overwrite=overwrite)
    show(evaluation, model)


def flag_of(name: str) -> str:
    """Return the command-line option for a field of `EvalOptions`, such as --top-p."""
    return "--k" if name == "num_samples" else "--" + name.replace("_", "-")


def options_of(values: dict[str, Any]) -> EvalOptions:
    """Build `EvalOptions` from the command line's values, and check their ranges.

    Raises:
        UserError: names the first option that is out of its range.
    """
    try:
        return EvalOptions(**values)
    except ValidationError as errors:
        error = errors.errors()[0]
        name = str(error["loc"][0])
        rule = error["msg"].replace("Input should be", "must be")
        raise UserError(f"{flag_of(name)} {error['input']} {rule}") from None


def _with_fields(signature: inspect.Signature) -> inspect.Signature:
    """Replace ``**options`` by one option for each field of `EvalOptions`, with its type and help text.

    Typer reads a command's options from its signature.
    """
    parameters = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.kind is not Parameter.VAR_KEYWORD
    ]
    for name, field in EvalOptions.model_fields.items():
        annotation: Any = Annotated[field.annotation, Option(flag_of(name), help=field.description)]
        parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    return signature.replace(parameters=parameters)


eval_command.__signature__ = _with_fields(  # type: ignore[attr-defined]
    inspect.signature(eval_command, eval_str=True)
)
