"""``nemo-grpo recipe``: list, copy, check, resolve and compare recipes without starting anything."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument

from nemo_grpo.support import shipped
from nemo_grpo.support.errors import EXIT_USAGE, UserError, as_yaml, did_you_mean, shown
from nemo_grpo.support.extensions import trial_imports

if TYPE_CHECKING:
    from rich.console import Console

    from nemo_grpo.recipe import Recipe
    from nemo_grpo.recipe.interpolation import Resolved

app = typer.Typer(
    name="recipe",
    no_args_is_help=True,
    help="List, copy, check, resolve and compare recipes, and print their rules. Nothing is trained.",
)
WIDTH = 200
"""Columns of tables where there is no terminal."""
RecipeFile = Annotated[Path, Argument(help="Recipe.")]
Overrides = Annotated[
    list[str] | None,
    Argument(metavar="[KEY=VALUE]...", help="key=value, ++key=value or ~key (remove); values are YAML"),
]


@app.command()
def check(
    items: Annotated[
        list[str],
        Argument(
            metavar="PATH... [KEY=VALUE]...", help="Recipes, sweeps or folders, then overrides for all."
        ),
    ],
) -> None:
    """Validate recipes and sweeps (every setting of one): one line each, exit code 2 if any is wrong.

    Example: nemo-grpo recipe check recipes grpo.max_num_steps=2
    """
    paths, overrides = split_items(items, "check")
    missing: list[str] = []
    with trial_imports():
        results = [_check_one(path, overrides, missing) for path in paths]
    if missing:
        from nemo_grpo.run.recipe_checks import remedies

        for sentence in remedies(missing):
            _note(sentence)
    if not all(results):
        typer.echo(f"{results.count(False)} of {len(results)} recipes are wrong", err=True)
        raise typer.Exit(EXIT_USAGE)


def _check_one(path: Path, overrides: list[str], missing: list[str]) -> bool:
    from nemo_grpo.experiments.sweep import is_sweep
    from nemo_grpo.recipe import advice, load_recipe
    from nemo_grpo.run.recipe_checks import check_recipe

    try:
        if is_sweep(path):
            summary, notes = _sweep_summary(path, overrides, missing), []
        else:
            recipe = load_recipe(path, overrides)
            found = check_recipe(recipe)
            found.refuse(missing=False)
            missing += found.missing
            summary, notes = _summary(recipe), [*advice(recipe), *found.notes]
    except UserError as error:
        typer.echo(f"{typer.style('error', fg='red')}  {path}: {str(error).removeprefix(f'{path}: ')}")
        return False
    typer.echo(f"{typer.style('ok', fg='green')}     {path}: {summary}")
    for sentence in notes:
        _note(sentence)
    return True


def _note(sentence: str) -> None:
    typer.echo(f"       {typer.style('note', fg='yellow')} {sentence}")


def _summary(recipe: Recipe) -> str:
    m = recipe.policy.megatron_cfg
    model = recipe.policy.model_name or "new model"
    if Path(model).is_absolute():
        model = Path(model).name
    return (
        f"{recipe.loss_fn.variant or recipe.loss_fn.title}, {model}, "
        f"{recipe.grpo.max_num_steps} steps of {recipe.grpo.num_prompts_per_step} x "
        f"{recipe.grpo.num_generations_per_prompt}{recipe.or_passes}, TP {m.tensor_model_parallel_size} "
        f"PP {m.pipeline_model_parallel_size} CP {m.context_parallel_size} DP {recipe.data_parallel_size}"
    )


def _sweep_summary(path: Path, overrides: list[str], missing: list[str]) -> str:
    from nemo_grpo.experiments.jobs import make_jobs, naming
    from nemo_grpo.experiments.sweep import load_sweep, targets, with_overrides
    from nemo_grpo.run.recipe_checks import check_recipe

    found = {}
    for target in targets(path):
        sweep = load_sweep(path, target)
        jobs = make_jobs(with_overrides(sweep.settings, overrides), sweep.seeds[:1], Path("runs"))
        for job in jobs:
            with naming(job.setting):
                checked = check_recipe(job.recipe)
                checked.refuse(missing=False)
            missing += checked.missing
        name = jobs[0].setting.recipe.name
        found[target] = f"{name}, {len(jobs)} settings x {len(sweep.seeds)} seeds"
    return f"sweep of {'; on the cluster of '.join(found.values())}"


@app.command()
def resolve(path: RecipeFile, overrides: Overrides = None) -> None:
    """Print a recipe as it will run: bases merged, overrides applied, every default written out.

    An invalid recipe is shown with what is wrong above each key; exit code 2.

    Example: nemo-grpo recipe resolve recipes/quickstart.yaml loss_fn.variant=gpg
    """
    from nemo_grpo.recipe.recipe import as_text

    settings, errors = _settings(path, overrides or ())
    typer.echo("\n".join(annotated(as_text(settings).splitlines(), errors)))
    if errors:
        raise typer.Exit(EXIT_USAGE)


def _settings(path: Path, overrides: Iterable[str] = ()) -> tuple[Resolved, list[str]]:
    """Read the settings of a recipe that may be invalid, and its errors."""
    from nemo_grpo.recipe import load_recipe
    from nemo_grpo.recipe.validation import RecipeErrors

    try:
        return load_recipe(path, overrides).resolved, []
    except RecipeErrors as error:
        return error.settings, error.errors


def annotated(lines: Iterable[str], errors: Iterable[str]) -> Iterator[str]:
    """Put each message as a comment above its key's line; messages without a line come first."""
    left, shown, place = list(errors), list[str](), list[str]()
    for line in lines:
        if key := re.match(r"( *)([^\s#-][^\s]*):(?= |$)", line):
            place = [*place[: len(key[1]) // 2], key[2].strip("'\"")]
            about = [error for error in left if _is_about(error, ".".join(place))]
            shown += [typer.style(f"{key[1]}# wrong: {error}", fg="red") for error in about]
            left = [error for error in left if error not in about]
        shown.append(line)
    yield from (typer.style(f"# wrong: {error}", fg="red") for error in left)
    yield from shown


def _is_about(error: str, key: str) -> bool:
    return re.match(rf"(unknown key )?{re.escape(key)}(?![\w.])", error) is not None


@app.command()
def diff(
    first: Annotated[Path, Argument(metavar="A", help="Recipe.")],
    second: Annotated[Path, Argument(metavar="B", help="Recipe.")],
) -> None:
    """Show which keys differ between two resolved recipes: - only in A, + only in B, ~ in both.

    What is wrong with an invalid one is said below; exit code 2.

    Example: nemo-grpo recipe diff recipes/quickstart.yaml recipes/quickstart-cw_grpo.yaml
    """
    from nemo_grpo.recipe.loader import merge
    from nemo_grpo.support.dotted import leaves

    (settings_a, wrong_a), (settings_b, wrong_b) = _settings(first), _settings(second)
    a, b = dict(leaves(merge(*settings_a))), dict(leaves(merge(*settings_b)))
    lines = [line for key in sorted(a | b) for line in difference(key, a, b)]
    typer.echo("\n".join(lines) or f"{first} and {second} resolve to the same recipe")
    for path, error in [(first, error) for error in wrong_a] + [(second, error) for error in wrong_b]:
        typer.echo(f"{typer.style('error', fg='red')}  {path}: {error}", err=True)
    if wrong_a or wrong_b:
        raise typer.Exit(EXIT_USAGE)


@app.command()
def prompt(path: RecipeFile, overrides: Overrides = None) -> None:
    """Print the first training prompt as the model sees it, with the tokens of its chat template.

    Example: nemo-grpo recipe prompt recipes/quickstart.yaml
    """
    from nemo_grpo.recipe import load_recipe
    from nemo_grpo.tasks import encode_prompt

    recipe = load_recipe(path, overrides or ())
    own, named, task = recipe.nemo_grpo, recipe.policy.tokenizer, recipe.task.build()
    if own.target == "cluster" and (named.chat_template != "default" or named.chat_template_kwargs):
        raise UserError(
            "policy.tokenizer.chat_template: NeMo-RL puts it in the place of the tokenizer's; look at "
            "train_data_step1.jsonl of a rehearsal (nemo-grpo rehearse)"
        )
    if own.new_model is not None:
        from nemo_grpo.engine.task_tokenizer import build_tokenizer

        tokenizer = build_tokenizer(task, own.new_model.vocab_size, own.new_model.seed)
    else:
        from nemo_grpo.support.hf_folder import load_tokenizer

        tokenizer = load_tokenizer(Path(named.name or ""))
    problem, has_images = task.train_problem(0, recipe.grpo.seed), task.config.needs_images
    tokens = encode_prompt(tokenizer, own.prompt, problem, with_images=has_images)
    typer.echo(tokenizer.decode(tokens, skip_special_tokens=False))


@app.command("list")
def list_recipes(
    pattern: Annotated[str, Argument(help="Part of a name.")] = "",
) -> None:
    """List the recipes that come with the package; every command takes their names for a file.

    Example: nemo-grpo recipe list quickstart
    """
    from nemo_grpo.recipe import load_recipe

    names = [name for name in shipped.recipe_names() if pattern in name]
    if not names:
        raise UserError(f"no shipped recipe has {pattern!r} in its name; `nemo-grpo recipe list` shows all")
    for name in names:
        typer.echo(f"{name}: {_summary(load_recipe(name))}")


@app.command()
def copy(
    name: Annotated[str, Argument(help="A shipped recipe, see list.")],
    target: Annotated[Path | None, Argument(help="File to write. Default: its name, here.")] = None,
) -> None:
    """Copy a shipped recipe here, to be changed; its bases stay the shipped ones.

    Example: nemo-grpo recipe copy quickstart my.yaml
    """
    source = shipped.named(name)
    if source is None:
        near = did_you_mean(name, shipped.recipe_names())
        raise UserError(f"{name} is no name of a shipped recipe{near}; `nemo-grpo recipe list` shows them")
    written = Path(source.name) if target is None else target / source.name if target.is_dir() else target
    try:
        with written.open("x", encoding="utf-8") as file:
            file.write(shipped.portable(source))
    except FileExistsError:
        raise UserError(f"{written} exists; name another file") from None
    except OSError as error:
        raise UserError(f"{written} cannot be written: {error.strerror}") from None
    typer.echo(f"{written}: a copy of {name}; change nemo_grpo.run_name in it")


@app.command()
def rules() -> None:
    """Print the tables of rules, one a line: scope, condition, rule and reason, where {key} is a value.

    Example: nemo-grpo recipe rules | grep sequence_packing
    """
    from nemo_grpo.recipe.registry import Scope
    from nemo_grpo.recipe.rows import in_words
    from nemo_grpo.recipe.tables import rows
    from nemo_grpo.rehearsal import replacements

    for scope in Scope:
        for row in rows(scope):
            typer.echo(in_words(row))
    rehearsal = replacements.REHEARSAL | replacements.OF_THE_FULL_MODEL
    for machine, table in (("CPU", replacements.CPU), ("REHEARSAL", rehearsal)):
        for key, replacement in table.items():
            typer.echo(f"{machine} {key} becomes {as_yaml(replacement.value)}: {replacement.reason}")


def difference(key: str, a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Show in a coloured line how ``key`` differs, or nothing."""
    if key in a and key in b:
        changed = typer.style(f"~ {key}: {shown(a[key])} -> {shown(b[key])}", fg="yellow")
        return [changed] if a[key] != b[key] else []
    sign, tree, colour = ("-", a, "red") if key in a else ("+", b, "green")
    return [typer.style(f"{sign} {key}: {shown(tree[key])}", fg=colour)]


def split_items(items: list[str], verb: str) -> tuple[list[Path], list[str]]:
    """Split the arguments of a command on many recipes into (files, overrides for all of them)."""
    paths = [path for item in items if not is_override(item) for path in recipe_files(item)]
    if not paths:
        raise UserError(f"no recipe to {verb}; name a file, or a folder that holds *.yaml")
    return paths, [item for item in items if is_override(item)]


def wide_console(*, stderr: bool = False) -> Console:
    """Make a console as wide as the terminal or COLUMNS; in a pipe or file, wide enough for whole names."""
    from rich.console import Console

    console = Console(stderr=stderr)
    has_width = console.is_terminal or "COLUMNS" in os.environ
    return console if has_width else Console(width=WIDTH, stderr=stderr)


def is_override(item: str) -> bool:
    """True for an override, False for a path."""
    return item.startswith(("~", "++")) or ("=" in item and not Path(item).exists())


def recipe_files(item: str) -> list[Path]:
    """List the file itself, or every recipe below a folder, except in folders named base."""
    path = shipped.beside(Path(), item) if item.startswith(shipped.SCHEME) else Path(item)
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.rglob("*.yaml") if "base" not in file.relative_to(path).parts[:-1])
