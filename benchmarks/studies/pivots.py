"""Perturb solved responses at their most uncertain tokens: ERPO's Figure 1, of a trained model.

    python -m benchmarks.studies.pivots --run runs/quickstart
    python -m benchmarks.studies.pivots --model FOLDER --recipe recipes/quickstart.yaml --replacement policy
    python -m benchmarks.studies.pivots --run runs/quickstart --perturbation together

`perturbation` says what is compared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from matplotlib.axes import Axes

from nemo_grpo.cli import main
from nemo_grpo.evaluate.folders import check_place, finite_logits, result_name
from nemo_grpo.support import machine
from nemo_grpo.support.errors import UserError
from nemo_grpo.support.hf_folder import load_config
from nemo_grpo.support.pictures import COLORS, INK, new_figure, set_title, tidy, write_png

if TYPE_CHECKING:
    from benchmarks.studies.pivot_results import PivotSettings, PivotStudy
    from nemo_grpo.recipe import Recipe


app = typer.Typer(add_completion=False)

RESULT = "pivots.json"
PICTURE = "pivots.png"


@app.command()
def pivots(
    run: Annotated[Path | None, typer.Option(help="Folder of a finished run: its model and recipe.")] = None,
    model: Annotated[Path | None, typer.Option(help="Hugging Face folder.")] = None,
    recipe: Annotated[Path | None, typer.Option(help="Recipe whose task and prompt are used.")] = None,
    num_problems: Annotated[int, typer.Option(min=2, help="Solved problems to study.")] = 50,
    share: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of a response's tokens, per kind.")
    ] = 0.05,
    max_positions: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum positions per kind and response. Default: 4; together: all."),
    ] = None,
    k: Annotated[int, typer.Option(min=1, help="Continuations of each perturbed response.")] = 4,
    perturbation: Annotated[
        Literal["separately", "together", "truncate"],
        typer.Option(help="Replace one token at a time, or all of a kind at once, or cut before one."),
    ] = "separately",
    replacement: Annotated[
        Literal["uniform", "policy"],
        typer.Option(help="Any other token, or another one drawn from the policy."),
    ] = "uniform",
    seed: Annotated[int, typer.Option(help="Seed of positions, replacements, continuations.", min=0)] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder of pivots.json and pivots.png.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Recipe overrides."),
    ] = None,
) -> None:
    """Perturb solved responses at decision pivots and elsewhere, resample the rest, compare accuracies."""
    from nemo_grpo.recipe import load_recipe

    model, recipe = _sources(run, model, recipe)
    loaded = load_recipe(recipe, overrides or [])
    if not out:
        default_out = Path(loaded.nemo_grpo.runs_dir) / f"pivots-{result_name(model)}"
        out = run / "diagnostics" if run else default_out
    check_place(out)

    from benchmarks.studies.pivot_results import PivotSettings

    if max_positions is None and perturbation != "together":
        max_positions = PivotSettings.max_positions
    settings = PivotSettings(num_problems, share, max_positions, k, replacement, seed, perturbation)
    with finite_logits(model):
        study, decode = _study(loaded, model, settings)
    result = {"model": str(model), "task": loaded.task.model_dump(mode="json")} | study.to_dict(decode)
    _write(result, out)
    _show(result, out)


def _sources(run: Path | None, model: Path | None, recipe: Path | None) -> tuple[Path, Path]:
    """Return the folder of the model and the recipe: the given ones, or else the run's."""
    if run is not None:
        model = model or run / "hf"
        recipe = recipe or run / "recipe.resolved.yaml"
    if model is None or recipe is None:
        raise UserError("give --run RUN, or --model FOLDER and --recipe FILE")
    if not (model / "config.json").is_file():
        raise UserError(
            f"--model {model} holds no model (no config.json); let the run finish, or name another"
        )
    return model, recipe


def _study(recipe: Recipe, model: Path, settings: PivotSettings) -> tuple[PivotStudy, Any]:
    import torch

    from benchmarks.studies.perturbation import Experiment
    from nemo_grpo.engine import setup
    from nemo_grpo.engine.checks import choose_device
    from nemo_grpo.sampling.generators import build_local
    from nemo_grpo.support.hf_folder import end_tokens, load_tokenizer
    from nemo_grpo.tasks.base import MultiTurnTask

    section = recipe.nemo_grpo
    if section.engine.generator == "vllm":
        raise UserError(
            "nemo_grpo.engine.generator=vllm gives no entropies to the study; use auto, decoder or hf"
        )
    task = recipe.task.build()
    if isinstance(task, MultiTurnTask):
        raise UserError(
            f"nemo_grpo.task.name={recipe.task.name}: responses have several turns, which the study cannot "
            "continue; choose a run of another task"
        )
    torch.set_num_threads(section.engine.num_threads)
    tokenizer = load_tokenizer(model)
    generator = build_local(
        section.engine.generator,
        model,
        setup.DTYPES[machine.precision(recipe.policy.precision, load_config(model).hidden_size)],
        choose_device(recipe),
        recipe.policy.generation_batch_size,
    )
    problems = task.validation_problems(section.evaluation.num_problems)
    sampling = setup.validation_sampling(recipe, end_tokens(model, tokenizer))
    study = Experiment(generator, tokenizer, task, section.prompt, sampling, settings).study(problems)
    return study, lambda token: str(tokenizer.decode([token]))


def _write(result: dict[str, Any], out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / RESULT).write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {out} cannot be written ({error.strerror}); choose another folder") from None
    draw_pivots(result, out / PICTURE)


def _show(result: dict[str, Any], out: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    changed = "cut" if result["settings"]["perturbation"] == "truncate" else "replaced"
    table = Table("positions", "entropy", "token kept", f"token {changed}", "drop")
    for kind, row in result["summary"].items():
        pairs = [f"{row[name]:.3f} +- {row[f'{name}_stderr']:.3f}" for name in ("kept", "replaced", "drop")]
        table.add_row(kind, f"{row['entropy']:.3f}", *pairs)
    console = Console()
    console.print(
        f"{result['model']}: {result['num_solved']} solved of {result['num_tried']} problems", highlight=False
    )
    console.print(table)
    for name, row in result["contrasts"].items():
        text = f"drop at {name}: {row['difference']:+.3f} +- {row['stderr']:.3f}, p = {row['p']:.4f}"
        console.print(text, highlight=False)
    console.print(f"{out / RESULT}, {out / PICTURE}", highlight=False, soft_wrap=True)


KINDS = {"pivot": "highest entropy", "random": "random", "calm": "lowest entropy"}
MAX_TOKENS_SHOWN = 60


def draw_pivots(study: Mapping[str, Any], path: Path) -> None:
    """Draw a study's JSON object (ERPO Figure 1 a and b)."""
    figure = new_figure(11.5, 4.4)
    left, right = figure.subplots(1, 2, width_ratios=(1.7, 1))
    _draw_response(left, study)
    _draw_accuracies(right, study)
    write_png(figure, path, dpi=130)


def _draw_response(axes: Axes, study: Mapping[str, Any]) -> None:
    """Draw the entropy of each token of the first response, pivots marked."""
    response = study["responses"][0]
    tokens = response["tokens"][:MAX_TOKENS_SHOWN]
    entropies = response["entropies"][:MAX_TOKENS_SHOWN]
    pivot_positions: set[int] = set()
    for point in study["points"]:
        if point["problem"] == response["problem"] and point["kind"] == "pivot":
            pivot_positions.update(point["positions"])
    colors = [COLORS[1] if index in pivot_positions else COLORS[4] for index in range(len(tokens))]
    axes.bar(range(len(tokens)), entropies, color=colors, width=0.8)
    tidy(axes)
    size = 8 if len(tokens) <= 30 else 5.5
    # repr shows white space. matplotlib would read text between dollar signs as mathematics.
    labels = [repr(token)[1:-1].replace("$", r"\$") for token in tokens]
    axes.set_xticks(range(len(tokens)), labels, rotation=90, fontsize=size)
    set_title(axes, "Entropy along a response, pivots in red")
    axes.set_ylabel("nats", fontsize=9, color=INK)


def _draw_accuracies(axes: Axes, study: Mapping[str, Any]) -> None:
    """Draw the accuracy after each kind of position, with one standard error over responses."""
    for offset, quantity, color in ((-0.19, "kept", COLORS[5]), (0.19, "replaced", COLORS[1])):
        values = [study["summary"][kind][quantity] for kind in KINDS]
        errors = [study["summary"][kind][f"{quantity}_stderr"] for kind in KINDS]
        places = [index + offset for index in range(len(KINDS))]
        axes.bar(places, values, yerr=errors, width=0.36, color=color, label=f"token {quantity}", capsize=3)
    axes.set_xticks(range(len(KINDS)), list(KINDS.values()), fontsize=9)
    axes.set_ylim(0, 1.05)
    set_title(axes, "Accuracy of the continuations")
    axes.legend(frameon=False, fontsize=8.5, ncols=2, loc="upper right")
    tidy(axes)


if __name__ == "__main__":
    main(app)
