"""``nemo-grpo plan``: memory, time and cost of recipes on their GPUs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from nemo_grpo.cli.recipe import split_items, wide_console
from nemo_grpo.support.errors import EXIT_USAGE, UserError

if TYPE_CHECKING:
    from rich.console import Console

    from nemo_grpo.plan.planner import Plan
    from nemo_grpo.recipe import Recipe

PLAN_FIELDS = ("name", "gpu", "problems", "nearest", "usable_bytes", "cache_tokens", "approximated")
POINT_FIELDS = ("num_gpus", "strong_overrides", "weak_overrides", "note")
"""Fields of a plan and of its scaling's points that --json prints as they are."""


def plan(
    items: Annotated[
        list[str],
        Argument(
            metavar="PATH... [KEY=VALUE]...",
            help="Recipes, or folders of them, then overrides for all.",
        ),
    ],
    gpu: Annotated[
        str | None,
        Option(
            help="GPU: h100 (default), h200, b200, gb200, a100, h800, h20, l40s, or cpu for this machine."
        ),
    ] = None,
    model_config: Annotated[
        Path | None, Option(help="config.json of a model that the planner does not know.")
    ] = None,
    hardware: Annotated[Path | None, Option(help="YAML file that describes other GPUs.")] = None,
    lengths: Annotated[
        str | None,
        Option(help="Mean tokens of a response, or a run's *.jsonl, from which the lengths are read."),
    ] = None,
    prompt_length: Annotated[float, Option(help="Mean tokens of a prompt.")] = 128,
    signal: Annotated[
        float, Option(help="Share of groups whose rewards differ; dynamic sampling draws the rest again.")
    ] = 0.5,
    acceptance: Annotated[
        float, Option(help="Share of drafted tokens that speculative decoding accepts.")
    ] = 0.87,
    price: Annotated[float | None, Option(min=0, help="Dollars per GPU-hour, to show the cost.")] = None,
    best: Annotated[bool, Option("--best", help="Search the fastest layouts that fit.")] = False,
    scale: Annotated[
        str | None, Option(help="Numbers of GPUs, such as 8,64,512. Each is planned with its best layout.")
    ] = None,
    png: Annotated[Path | None, Option(help="PNG file into which --scale is drawn.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Estimate memory per GPU, time and cost of recipes, and name the nearest layout that fits.

    The command needs neither a GPU nor NeMo-RL. It also checks that batches and layouts divide.

    Exit codes: 0 every recipe fits; 2 a recipe does not fit, or is wrong.

    Examples:
      nemo-grpo plan recipes/cw_grpo/cw_grpo-qwen2.5-math-7b-instruct-1n8g.yaml --gpu h200 --price 2.5
      nemo-grpo plan recipes/gpg policy.train_micro_batch_size=2
      nemo-grpo plan recipes/gpg/gpg-qwen2.5-32b-4n8g.yaml --lengths 4000 --best --scale 32,64,128
    """
    from nemo_grpo.plan.forecast import Assumptions
    from nemo_grpo.plan.planner import plan_recipe
    from nemo_grpo.recipe import load_recipe
    from nemo_grpo.recipe.cluster_rules import logprob_and_training_batches_match_at_high_tp

    paths, overrides = split_items(items, "plan")
    assumed = Assumptions(_lengths(lengths), prompt_length, signal, acceptance)
    recipes: list[Recipe] = []
    plans: list[Plan] = []
    refused: list[str] = []
    notes: list[str] = []
    for path in paths:
        try:
            with without_tp_check():
                recipe = load_recipe(path, overrides)
            if recipe.nemo_grpo.target == "cluster":
                notes += logprob_and_training_batches_match_at_high_tp(recipe)
            neighbours = _recipes_beside(path, overrides)
            kind = gpu or _default_gpu(recipe)
            plans.append(plan_recipe(recipe, kind, model_config, hardware, assumed, neighbours))
            recipes.append(recipe)
        except UserError as error:
            # A wrong recipe among several does not keep the others from being planned.
            if len(paths) == 1:
                raise
            refused.append(f"{path}: {error}")
    is_single_forecast = len(plans) == 1 and plans[0].forecast is not None and not plans[0].setup.embedded
    if (best or scale) and not is_single_forecast:
        raise UserError("--best and --scale take one recipe with target=cluster; name that one")
    if png and not scale:
        raise UserError(f"--png {png} draws --scale; give that too, such as --scale 8,64,512")
    further = _further(recipes[0], plans[0], best, scale) if is_single_forecast else {}
    if as_json:
        typer.echo(json.dumps(_as_json(plans, further, price), indent=2))
    else:
        _show(wide_console(), plans, further, price, notes, _about_data(recipes))
    if png:
        from nemo_grpo.plan.scaling import draw_scaling

        draw_scaling(further["scale"], png, f"{plans[0].name} on {plans[0].gpu}")
    for message in refused:
        typer.echo(f"error: {message}", err=True)
    if refused or not all(single.accepted for single in plans):
        raise typer.Exit(EXIT_USAGE)


@contextmanager
def without_tp_check() -> Iterator[None]:
    """Switch NeMo-RL's check of unequal batches off within the block, as NVIDIA's own scripts do.

    A plan does not depend on the check. So the command mentions it in a note and does not refuse the recipe.
    """
    from nemo_grpo.recipe.cluster_rules import TP_CHECK_OFF

    before = os.environ.get(TP_CHECK_OFF)
    os.environ[TP_CHECK_OFF] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[TP_CHECK_OFF]
        else:
            os.environ[TP_CHECK_OFF] = before


def _default_gpu(recipe: Recipe) -> str:
    """Choose the GPU for which a recipe is planned without --gpu."""
    from nemo_grpo.plan.hardware import CPU

    if recipe.nemo_grpo.target != "embedded":
        return "h100"
    device = recipe.nemo_grpo.engine.device
    if device == "auto":
        # This file exists if an NVIDIA driver is loaded. Torch would know better, but its import takes
        # seconds.
        device = "cuda" if Path("/dev/nvidiactl").exists() else "cpu"
    return CPU if device == "cpu" else "h100"


def _recipes_beside(path: Path, overrides: list[str]) -> Iterator[Recipe]:
    """Load the valid recipes in a recipe's folder, with the same overrides."""
    from nemo_grpo.recipe import load_recipe
    from nemo_grpo.support import shipped

    for file in sorted(shipped.recipe_file(path).parent.glob("*.yaml")):
        with suppress(UserError):
            yield load_recipe(file, overrides)


def _about_data(recipes: list[Recipe]) -> list[str]:
    """List the remedies for missing files without repetitions. For a single recipe also describe its data."""
    from nemo_grpo.run.recipe_checks import check_data, missing_files, remedies

    if len(recipes) > 1:
        return list(remedies(file for recipe in recipes for file in missing_files(recipe)))
    data = check_data(recipes[0])
    sentences = [*data.errors, *remedies(data.missing), *data.notes]
    if data.found:
        sentences.append(data.found)
    return sentences


def _lengths(option: str | None) -> float | Path | None:
    """Read --lengths. It is a number of tokens, or else the path of a file."""
    if option is None:
        return None
    try:
        return float(option)
    except ValueError:
        return Path(option)


def _further(recipe: Recipe, plan: Plan, best: bool, scale: str | None) -> dict[str, Any]:
    """Compute the fastest layouts for --best, and the numbers of GPUs for --scale."""
    from nemo_grpo.plan.layouts import best_layouts
    from nemo_grpo.plan.scaling import scaling

    assert plan.forecast is not None
    further: dict[str, Any] = {}
    if best:
        further["best"] = best_layouts(recipe, plan.forecast)
    if scale:
        further["scale"] = scaling(recipe, plan.forecast, scale)
    return further


def _show(
    console: Console,
    plans: list[Plan],
    further: dict[str, Any],
    price: float | None,
    notes: list[str],
    data: list[str],
) -> None:
    from nemo_grpo.cli import plan_tables as tables
    from nemo_grpo.plan.scaling import own_layout

    def line(text: str, style: str | None = None) -> None:
        console.print(text, style=style, soft_wrap=True, highlight=False, markup=False)

    first = plans[0]
    is_single = len(plans) == 1
    if is_single:
        console.print(tables.memory_table(first))
    else:
        for text, style in tables.overview(plans, price):
            line(text, style)
    if is_single and first.forecast:
        console.print(tables.time_table(first.forecast))
        for sentence in tables.sentences(first.forecast, price):
            line(sentence)
    if first.forecast and "best" in further:
        console.print(tables.best_table(first.forecast, further["best"]))
        if not further["best"]:
            line("no layout of the search fits; use more nodes")
    if "scale" in further:
        console.print(tables.scale_table(further["scale"], price))
        line(own_layout(further["scale"]))
    if is_single and first.setup.embedded:
        line("time: predicted for the cluster engine alone; the embedded engine shows it after a step")
    for sentence in notes:
        line(f"note: {sentence}")
    for sentence in data:
        line(f"data: {sentence}")
    # Recipes of one model share approximations. A dict drops repetitions and keeps the order.
    for sentence in dict.fromkeys(sentence for plan in plans for sentence in plan.approximated):
        line(f"approximated: {sentence}")
    for plan in plans:
        if plan.accepted:
            continue
        for problem in plan.problems:
            line(f"{plan.name}: {problem}", "red")
        if plan.nearest:
            line(f"  nearest that fits: {' '.join(plan.nearest)}")


def _as_json(plans: list[Plan], further: dict[str, Any], price: float | None) -> dict[str, Any]:
    """Convert the content of the tables that `_show` prints to JSON's types."""
    from nemo_grpo.plan.forecast import Forecast, as_dict

    def time(forecast: Forecast | None) -> Any:
        return None if forecast is None else as_dict(forecast, price)

    recipes = []
    for plan in plans:
        record = {
            "num_gpus": plan.setup.num_nodes * plan.setup.gpus_per_node,
            "fits": plan.accepted,
            "training_bytes": {row.part: row.num_bytes for row in plan.rows},
            "peak_bytes": plan.peaks,
            "time": time(plan.forecast),
        }
        record |= {name: getattr(plan, name) for name in PLAN_FIELDS}
        recipes.append(record)
    document: dict[str, Any] = {"recipes": recipes}
    if "best" in further:
        document["best"] = [
            {
                "overrides": layout.overrides,
                "step_seconds": layout.forecast.step.seconds,
                "layout": asdict(layout.forecast.setup.layout),
            }
            for layout in further["best"]
        ]
    if "scale" in further:
        document["scale"] = []
        for point in further["scale"]:
            record = {name: getattr(point, name) for name in POINT_FIELDS}
            record |= {name: time(getattr(point, name)) for name in ("own", "strong", "weak")}
            document["scale"].append(record)
    return document
