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
RecipeFile = Annotated[Path, Argument(help="Recipe: a file, or the name of a shipped one.")]
Overrides = Annotated[
    list[str] | None,
    Argument(
        metavar="[KEY=VALUE]...",
        help="Changes of the recipe: key=value sets, ++key=value adds, ~key removes. Values are YAML.",
    ),
]


@app.command()
def check(
    items: Annotated[
        list[str],
        Argument(
            metavar="PATH... [KEY=VALUE]...",
            help="Recipes, sweeps or folders, then overrides for all.",
        ),
    ],
) -> None:
    """Validate recipes, and every setting of sweeps. The command prints a line for each.

    Exit codes: 0 all are right; 2 one is wrong.

    Example: nemo-grpo recipe check recipes grpo.max_num_steps=2
    """
    paths, overrides = split_items(items, "check")
    missing_files: list[str] = []
    with trial_imports():
        results = [_check_one(path, overrides, missing_files) for path in paths]
    if missing_files:
        from nemo_grpo.run.recipe_checks import remedies

        for sentence in remedies(missing_files):
            _note(sentence)
    if not all(results):
        typer.echo(f"{results.count(False)} of {len(results)} recipes are wrong", err=True)
        raise typer.Exit(EXIT_USAGE)


def _check_one(path: Path, overrides: list[str], missing_files: list[str]) -> bool:
    """Check a recipe or sweep and print its line; returns True if it is right.

    Args:
        path: file of the recipe or sweep.
        overrides: overrides for the recipe or for all settings of the sweep.
        missing_files: gets the data files that are missing.
    """
    from nemo_grpo.experiments.sweep import is_sweep
    from nemo_grpo.recipe import advice, load_recipe
    from nemo_grpo.run.recipe_checks import check_recipe

    notes: list[str] = []
    try:
        if is_sweep(path):
            summary = _sweep_summary(path, overrides, missing_files)
        else:
            recipe = load_recipe(path, overrides)
            findings = check_recipe(recipe)
            # A missing data file does not make a recipe wrong, because it can be prepared later.
            findings.refuse(missing=False)
            missing_files += findings.missing
            summary = _summary(recipe)
            notes = [*advice(recipe), *findings.notes]
    except UserError as error:
        # Some errors begin with the path, which this line already shows.
        message = str(error).removeprefix(f"{path}: ")
        typer.echo(f"{typer.style('error', fg='red')}  {path}: {message}")
        return False
    typer.echo(f"{typer.style('ok', fg='green')}     {path}: {summary}")
    for sentence in notes:
        _note(sentence)
    return True


def _note(sentence: str) -> None:
    typer.echo(f"       {typer.style('note', fg='yellow')} {sentence}")


def _summary(recipe: Recipe) -> str:
    """Describe a recipe on one line: loss, model, steps, layout."""
    megatron = recipe.policy.megatron_cfg
    grpo = recipe.grpo
    loss = recipe.loss_fn.variant or recipe.loss_fn.title
    model = recipe.policy.model_name or "new model"
    if Path(model).is_absolute():
        model = Path(model).name
    batch = f"{grpo.num_prompts_per_step} x {grpo.num_generations_per_prompt}"
    layout = (
        f"TP {megatron.tensor_model_parallel_size} PP {megatron.pipeline_model_parallel_size} "
        f"CP {megatron.context_parallel_size} DP {recipe.data_parallel_size}"
    )
    return f"{loss}, {model}, {grpo.max_num_steps} steps of {batch}{recipe.or_passes}, {layout}"


def _sweep_summary(path: Path, overrides: list[str], missing_files: list[str]) -> str:
    from nemo_grpo.experiments.jobs import make_jobs, naming
    from nemo_grpo.experiments.sweep import load_sweep, targets, with_overrides
    from nemo_grpo.run.recipe_checks import check_recipe

    descriptions = []
    for target in targets(path):
        sweep = load_sweep(path, target)
        # One seed of each setting is enough, because no check depends on the seed.
        jobs = make_jobs(with_overrides(sweep.settings, overrides), sweep.seeds[:1], Path("runs"))
        for job in jobs:
            with naming(job.setting):
                checked = check_recipe(job.recipe)
                checked.refuse(missing=False)
            missing_files += checked.missing
        name = jobs[0].setting.recipe.name
        descriptions.append(f"{name}, {len(jobs)} settings x {len(sweep.seeds)} seeds")
    return f"sweep of {'; on the cluster of '.join(descriptions)}"


@app.command()
def resolve(path: RecipeFile, overrides: Overrides = None) -> None:
    """Print a recipe as it will run: bases merged, overrides applied, every default written out.

    For an invalid recipe the command prints each error above its key.

    Example: nemo-grpo recipe resolve recipes/quickstart.yaml loss_fn.variant=gpg

    Exit codes: 0 the recipe is right; 2 it is wrong.
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
    """Insert each message as a comment above the line of its key. Messages without a line come first."""
    unplaced = list(errors)
    annotated_lines: list[str] = []
    # Keys of the sections around the current line, followed by the line's own key.
    keys: list[str] = []
    for line in lines:
        match = re.match(r"(?P<indent> *)(?P<key>[^\s#-][^\s]*):(?= |$)", line)
        if match:
            depth = len(match["indent"]) // 2
            keys = [*keys[:depth], match["key"].strip("'\"")]
            dotted_key = ".".join(keys)
            errors_of_key = [error for error in unplaced if _is_about(error, dotted_key)]
            for error in errors_of_key:
                annotated_lines.append(_as_comment(error, match["indent"]))
            # The text may contain a key twice, as a key and inside a value. Its message appears only once.
            unplaced = [error for error in unplaced if error not in errors_of_key]
        annotated_lines.append(line)
    for error in unplaced:
        yield _as_comment(error)
    yield from annotated_lines


def _as_comment(error: str, indent: str = "") -> str:
    return typer.style(f"{indent}# wrong: {error}", fg="red")


def _is_about(error: str, key: str) -> bool:
    """Return True if a message begins with the key, and not with a longer key."""
    return re.match(rf"(unknown key )?{re.escape(key)}(?![\w.])", error) is not None


@app.command()
def diff(
    first: Annotated[Path, Argument(metavar="A", help="First recipe.")],
    second: Annotated[Path, Argument(metavar="B", help="Second recipe.")],
) -> None:
    """Show which keys differ between two resolved recipes: - only in A, + only in B, ~ in both.

    If a recipe is invalid, its errors follow below.

    Example: nemo-grpo recipe diff recipes/quickstart.yaml recipes/quickstart-cw_grpo.yaml

    Exit codes: 0 both recipes are right; 2 one is wrong.
    """
    from nemo_grpo.recipe.loader import merge
    from nemo_grpo.support.dotted import leaves

    settings_a, errors_a = _settings(first)
    settings_b, errors_b = _settings(second)
    a = dict(leaves(merge(*settings_a)))
    b = dict(leaves(merge(*settings_b)))
    lines = [line for key in sorted(a | b) for line in difference(key, a, b)]
    if not lines:
        lines.append(f"{first} and {second} resolve to the same recipe")
    typer.echo("\n".join(lines))
    for path, errors in ((first, errors_a), (second, errors_b)):
        for error in errors:
            typer.echo(f"{typer.style('error', fg='red')}  {path}: {error}", err=True)
    if errors_a or errors_b:
        raise typer.Exit(EXIT_USAGE)


@app.command()
def prompt(path: RecipeFile, overrides: Overrides = None) -> None:
    """Print the first training prompt as the model sees it, with the tokens of its chat template.

    Example: nemo-grpo recipe prompt recipes/quickstart.yaml
    """
    from nemo_grpo.recipe import load_recipe
    from nemo_grpo.tasks import encode_prompt

    recipe = load_recipe(path, overrides or ())
    section = recipe.nemo_grpo
    tokenizer_section = recipe.policy.tokenizer
    has_template = tokenizer_section.chat_template != "default" or tokenizer_section.chat_template_kwargs
    if section.target == "cluster" and has_template:
        raise UserError(
            "policy.tokenizer.chat_template: NeMo-RL puts it in the place of the tokenizer's; look at "
            "train_data_step1.jsonl of a rehearsal (nemo-grpo rehearse)"
        )
    task = recipe.task.build()
    if section.new_model is not None:
        from nemo_grpo.engine.task_tokenizer import build_tokenizer

        tokenizer = build_tokenizer(task, section.new_model.vocab_size, section.new_model.seed)
    else:
        from nemo_grpo.support.hf_folder import load_tokenizer

        tokenizer = load_tokenizer(Path(tokenizer_section.name or ""))
    problem = task.train_problem(0, recipe.grpo.seed)
    tokens = encode_prompt(tokenizer, section.prompt, problem, with_images=task.config.needs_images)
    typer.echo(tokenizer.decode(tokens, skip_special_tokens=False))


@app.command("list")
def list_recipes(
    pattern: Annotated[str, Argument(help="Only recipes whose name contains this text are listed.")] = "",
) -> None:
    """List the recipes that come with the package. Every command takes such a name in place of a file.

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
    name: Annotated[str, Argument(help="Shipped recipe; `nemo-grpo recipe list` shows the names.")],
    target: Annotated[
        Path | None, Argument(help="File or folder for the copy. The default is this folder.")
    ] = None,
) -> None:
    """Copy a shipped recipe, so that you can change it. Its bases stay the shipped ones.

    Example: nemo-grpo recipe copy quickstart my.yaml
    """
    source = shipped.named(name)
    if source is None:
        near = did_you_mean(name, shipped.recipe_names())
        raise UserError(f"{name} is no name of a shipped recipe{near}; `nemo-grpo recipe list` shows them")
    path = Path() if target is None else target
    if path.is_dir():
        path = path / source.name
    try:
        # Mode x refuses an existing file, which may hold somebody's changes.
        with path.open("x", encoding="utf-8") as file:
            file.write(shipped.portable(source))
    except FileExistsError:
        raise UserError(f"{path} exists; name another file") from None
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None
    typer.echo(f"{path}: a copy of {name}; change nemo_grpo.run_name in it")


@app.command()
def rules() -> None:
    """Print the rules for recipes, one a line: scope, condition, rule and reason.

    {key} in a line stands for the value of that key.

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
    """Return a coloured line that shows how ``key`` differs, or no line if it does not."""
    if key not in b:
        return [typer.style(f"- {key}: {shown(a[key])}", fg="red")]
    if key not in a:
        return [typer.style(f"+ {key}: {shown(b[key])}", fg="green")]
    if a[key] == b[key]:
        return []
    return [typer.style(f"~ {key}: {shown(a[key])} -> {shown(b[key])}", fg="yellow")]


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
    """Return True for an override, False for a path."""
    # A path may also contain "=": the folders of a sweep's runs do.
    return item.startswith(("~", "++")) or ("=" in item and not Path(item).exists())


def recipe_files(item: str) -> list[Path]:
    """List the file itself, or all recipes below a folder except those in folders named base."""
    path = shipped.beside(Path(), item) if item.startswith(shipped.SCHEME) else Path(item)
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.rglob("*.yaml") if "base" not in file.relative_to(path).parts[:-1])
