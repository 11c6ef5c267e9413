"""``nemo-grpo plan``: will a recipe fit its GPUs?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nemo_grpo.cli.recipe import split_items
from nemo_grpo.errors import EXIT_USAGE

if TYPE_CHECKING:
    from rich.table import Table

    from nemo_grpo.plan import Plan
    from nemo_grpo.recipe import Recipe

GIB = 1024**3
EMBEDDED = (
    "counted as NeMo-RL lays it out, in BF16; the embedded engine needs more: twice the weights under "
    "policy.precision=float32, FP32 gradients, and the sampler's own copy of the model"
)
"""Note on plans of embedded recipes: what they leave out."""


def plan(
    items: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH... [KEY=VALUE]...",
            help="Recipes or folders of recipes, then overrides for all of them.",
            show_default=False,
        ),
    ],
    gpu: Annotated[str, typer.Option(help="h100 (80 GB) or h200 (141 GB).")] = "h100",
    model_config: Annotated[
        Path | None, typer.Option(help="config.json of a model that the planner does not know.")
    ] = None,
) -> None:
    """Estimate memory per GPU, check divisibility, and name the nearest layout that fits.

    Needs neither a GPU nor NeMo-RL. Exit code 0: every recipe fits; 2: one does not, or is wrong.

    Examples:

      nemo-grpo plan recipes/cw_grpo/cw_grpo-qwen2.5-math-7b-instruct-1n8g.yaml --gpu h200

      nemo-grpo plan recipes/gpg policy.train_micro_batch_size=2
    """
    from nemo_grpo.cli.console import wide_console
    from nemo_grpo.plan import plan_recipe
    from nemo_grpo.recipe import load_recipe

    paths, overrides = split_items(items, "plan")
    recipes = [load_recipe(path, overrides) for path in paths]
    plans = [plan_recipe(recipe, gpu, model_config) for recipe in recipes]
    console = wide_console()
    console.print(details(plans[0]) if len(plans) == 1 else overview(plans))
    if embedded := [one.name for one in plans if one.setup.embedded]:
        names = ", ".join(embedded)
        console.print(f"note: {names}: {EMBEDDED}", soft_wrap=True, highlight=False, markup=False)
    for sentence in _about_data(recipes):
        console.print(f"data: {sentence}", soft_wrap=True, highlight=False, markup=False)
    for one in (one for one in plans if not one.accepted):
        for problem in one.problems:
            console.print(
                f"{one.name}: {problem}", style="red", soft_wrap=True, highlight=False, markup=False
            )
        if one.nearest:
            console.print(
                f"  nearest that fits: {' '.join(one.nearest)}", soft_wrap=True, highlight=False, markup=False
            )
    if not all(one.accepted for one in plans):
        raise typer.Exit(EXIT_USAGE)


def _about_data(recipes: list[Recipe]) -> list[str]:
    """What the recipes' files lack, once for all; of a single recipe also what they hold."""
    from nemo_grpo.launch.data_files import check_data, missing_files, remedies

    if len(recipes) > 1:
        return list(remedies(file for recipe in recipes for file in missing_files(recipe)))
    data = check_data(recipes[0])
    return [*data.errors, *data.notes, *([data.found] if data.found else [])]


def details(one: Plan) -> Table:
    """Full table of one recipe."""
    from rich.table import Table

    layout, setup = one.setup.layout, one.setup
    table = Table(
        title=f"{one.name}: {one.shape.name} on {setup.num_nodes} x {setup.gpus_per_node} {one.gpu}"
    )
    table.add_column("per GPU")
    table.add_column("GiB", justify="right")
    table.add_column("how")
    table.caption = (
        f"TP {layout.tensor} PP {layout.pipeline} CP {layout.context} EP {layout.expert} DP "
        f"{one.data_parallel_size}; {one.num_stage_parameters / 1e9:.2f} of {one.num_parameters / 1e9:.2f} B "
        f"parameters per GPU; usable {one.usable_bytes / GIB:.1f} GiB; "
        + ("fits" if one.accepted else "does not fit")
    )
    for row in one.rows:
        table.add_row(row.part, f"{row.num_bytes / GIB:.1f}", row.how)
    for number, (phase, size) in enumerate(one.peaks.items()):
        how = f"of {one.usable_bytes / GIB:.1f} usable" if phase != "rollout weights" else ""
        if number == 0:
            table.add_section()
        table.add_row(f"[bold]{phase}[/bold]", f"[bold]{size / GIB:.1f}[/bold]", how)
    if one.cache_tokens:
        table.add_row("KV cache", "", _cache(one))
    return table


def overview(plans: list[Plan]) -> Table:
    """One line per recipe."""
    from rich.table import Table

    table = Table(title=f"GiB per GPU, of {plans[0].usable_bytes / GIB:.1f} usable on {plans[0].gpu}")
    table.add_column("recipe", overflow="fold")  # cut short, recipes would have one name
    for column in ("layout", "training", "scoring", "refit", "KV cache", "verdict"):
        table.add_column(column, justify="left" if column in ("layout", "verdict") else "right")
    for one in plans:
        layout = one.setup.layout
        sizes = [f"{one.peaks[key] / GIB:.1f}" if key in one.peaks else "-" for key in _PHASES]
        text = f"TP{layout.tensor} PP{layout.pipeline} CP{layout.context} EP{layout.expert} "
        verdict = "[green]fits[/green]" if one.accepted else "[red]refused[/red]"
        table.add_row(one.name, f"{text}DP{one.data_parallel_size}", *sizes, _cache(one), verdict)
    return table


_PHASES = ("training", "scoring", "refit")


def _cache(one: Plan) -> str:
    return (
        f"{one.cache_tokens / one.setup.max_length:.0f} x {one.setup.max_length}" if one.cache_tokens else "-"
    )
