"""``nemo-grpo recipe``: check, resolve and compare recipes without starting anything."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nemo_grpo.errors import EXIT_USAGE, UserError

if TYPE_CHECKING:
    from nemo_grpo.recipe import Recipe

app = typer.Typer(
    no_args_is_help=True, help="Check, resolve and compare recipes. Nothing is trained or written."
)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="key=value, ++key=value or ~key (remove); values are YAML",
        show_default=False,
    ),
]


@app.command()
def check(
    items: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH... [KEY=VALUE]...",
            help="Recipes, sweeps, or folders (every *.yaml below, except base/), then overrides for all.",
            show_default=False,
        ),
    ],
) -> None:
    """Validate recipes and sweeps (every setting of one): one line each, exit code 2 if any is wrong.

    Example: nemo-grpo recipe check recipes grpo.max_num_steps=2
    """
    paths, overrides = split_items(items, "check")
    results = [_check_one(path, overrides) for path in paths]
    if not all(results):
        typer.echo(f"{results.count(False)} of {len(results)} recipes are wrong", err=True)
        raise typer.Exit(EXIT_USAGE)


def _check_one(path: Path, overrides: list[str]) -> bool:
    from nemo_grpo.experiments.sweep import is_sweep
    from nemo_grpo.recipe import advice, load_recipe, refuse_unsupported

    try:
        if is_sweep(path):
            typer.echo(f"{typer.style('ok', fg='green')}     {path}: {_sweep_summary(path, overrides)}")
            return True
        recipe = load_recipe(path, overrides)
        if recipe.nemo_grpo.target == "embedded":
            refuse_unsupported(recipe)
    except UserError as error:
        typer.echo(f"{typer.style('error', fg='red')}  {path}: {error}")
        return False
    typer.echo(f"{typer.style('ok', fg='green')}     {path}: {_summary(recipe)}")
    for sentence in advice(recipe):
        typer.echo(f"       {typer.style('note', fg='yellow')} {sentence}")
    return True


def _summary(recipe: Recipe) -> str:
    m = recipe.policy.megatron_cfg
    return (
        f"{recipe.loss_fn.variant}, {recipe.policy.model_name or 'warm start'}, "
        f"{recipe.grpo.max_num_steps} steps of {recipe.grpo.num_prompts_per_step} x "
        f"{recipe.grpo.num_generations_per_prompt}, TP {m.tensor_model_parallel_size} "
        f"PP {m.pipeline_model_parallel_size} CP {m.context_parallel_size} DP {recipe.data_parallel_size}"
    )


def _sweep_summary(path: Path, overrides: list[str]) -> str:
    from nemo_grpo.experiments.plan import plan_jobs
    from nemo_grpo.experiments.sweep import load_sweep, targets, with_overrides

    found = {}
    for target in targets(path):
        sweep = load_sweep(path, target)
        jobs = plan_jobs(with_overrides(sweep.settings, overrides), sweep.seeds[:1], Path("runs"))
        name = jobs[0].setting.recipe.name
        found[target] = f"{name}, {len(jobs)} settings x {len(sweep.seeds)} seeds"
    return f"sweep of {'; on the cluster of '.join(found.values())}"


@app.command()
def resolve(
    path: Annotated[Path, typer.Argument(help="Recipe.", show_default=False)],
    overrides: Overrides = None,
) -> None:
    """Print a recipe as it will run: bases merged, overrides applied, every default written out.

    Example: nemo-grpo recipe resolve recipes/quickstart.yaml loss_fn.variant=gpg
    """
    from nemo_grpo.recipe import load_recipe

    typer.echo(load_recipe(path, overrides or ()).to_yaml(), nl=False)


@app.command()
def diff(
    first: Annotated[Path, typer.Argument(metavar="A", help="Recipe.", show_default=False)],
    second: Annotated[Path, typer.Argument(metavar="B", help="Recipe.", show_default=False)],
) -> None:
    """Show which keys differ between two resolved recipes: - only in A, + only in B, ~ in both.

    Example: nemo-grpo recipe diff recipes/quickstart.yaml recipes/quickstart-cw_grpo.yaml
    """
    from nemo_grpo.dotted import leaves
    from nemo_grpo.recipe import load_recipe

    a, b = (dict(leaves(load_recipe(path).to_dict())) for path in (first, second))
    lines = [line for key in sorted(a | b) for line in difference(key, a, b)]
    typer.echo("\n".join(lines) if lines else f"{first} and {second} resolve to the same recipe")


def difference(key: str, a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """A coloured line showing how ``key`` differs, or nothing."""
    from nemo_grpo.recipe.keys import shown

    if key not in b:
        return [typer.style(f"- {key}: {shown(a[key])}", fg="red")]
    if key not in a:
        return [typer.style(f"+ {key}: {shown(b[key])}", fg="green")]
    if a[key] != b[key]:
        return [typer.style(f"~ {key}: {shown(a[key])} -> {shown(b[key])}", fg="yellow")]
    return []


def split_items(items: list[str], verb: str) -> tuple[list[Path], list[str]]:
    """Arguments of a command that takes many recipes: (the recipes' files, the overrides for all of them).

    Raises: UserError: there is no recipe to ``verb``.
    """
    paths = [path for item in items if not is_override(item) for path in recipe_files(Path(item))]
    if not paths:
        raise UserError(f"no recipe to {verb}; name a file, or a folder that holds *.yaml")
    return paths, [item for item in items if is_override(item)]


def is_override(item: str) -> bool:
    """True for an override, False for a path."""
    return item.startswith(("~", "++")) or ("=" in item and not Path(item).exists())


def recipe_files(path: Path) -> list[Path]:
    """The file itself, or every recipe below a folder, except in folders named base."""
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.rglob("*.yaml") if "base" not in file.relative_to(path).parts[:-1])
