"""Files that come with the package. In a clone they lie beside it, in an installed wheel within it."""

import re
from pathlib import Path

from nemo_grpo.support.errors import UserError, did_you_mean

SCHEME = "nemo_grpo://"
"""Prefix of a shipped recipe's name in ``defaults``, such as ``nemo_grpo://base/embedded.yaml``."""
MODEL_RESOLVER = "shipped_model"
"""Resolver for a shipped model's folder, as in ``policy.model_name: ${shipped_model:quickstart}``."""
_MODEL_REFERENCE = re.compile(rf"\$\{{{MODEL_RESOLVER}:(\w+)\}}")


def folder(name: str) -> Path:
    """Find the shipped folder ``recipes``, ``slurm`` or ``requirements``."""
    package = Path(__file__).parents[1]
    for path in (package / name, package.parent / name):
        if path.is_dir():
            return path
    raise UserError(f"{package / name} is missing; install the package again, by `pip install`")


def recipe_names() -> list[str]:
    """List the shipped recipes' names, such as ``gpg/gpg-qwen2.5-32b-4n8g``, but no bases and sweeps."""
    root = folder("recipes")
    files = (path.relative_to(root) for path in root.rglob("*.yaml"))
    return sorted(str(path.with_suffix("")) for path in files if path.parts[0] not in ("base", "sweeps"))


def portable(recipe: Path) -> str:
    """Return the text of a shipped recipe for a copy elsewhere: its ``defaults`` get the prefix `SCHEME`."""
    root = folder("recipes").resolve()

    def with_scheme(file_name: re.Match[str]) -> str:
        return SCHEME + (recipe.parent / file_name[0]).resolve().relative_to(root).as_posix()

    def with_portable_names(defaults_line: re.Match[str]) -> str:
        return re.sub(r"[\w./-]+\.yaml", with_scheme, defaults_line[0])

    # The text is edited, not the parsed YAML, so that the copy keeps the recipe's comments.
    text = recipe.read_text(encoding="utf-8")
    return re.sub(r"^defaults:[^#\n]*", with_portable_names, text, flags=re.MULTILINE)


def recipe_file(name: str | Path) -> Path:
    """Find the file of a recipe by its path, or by the name of a shipped recipe (`named`)."""
    if Path(name).exists():
        return Path(name)
    file = named(str(name))
    if file is not None:
        return file
    stems = {shipped_name.rpartition("/")[2] for shipped_name in recipe_names()}
    suggestion = did_you_mean(Path(_bare(str(name))).name, stems)
    # Without a near name `did_you_mean` lists all recipes, which `recipe list` shows better.
    if not suggestion.startswith("; did"):
        suggestion = ""
    raise UserError(
        f"{name}: No such file, nor a shipped recipe of that name{suggestion}; `nemo-grpo recipe list` "
        "shows them"
    )


def named(name: str) -> Path | None:
    """Find the shipped recipe of a name, which may have `SCHEME`, folder and ending; else return None."""
    name = _bare(name)
    root = folder("recipes")
    file = root / f"{name}.yaml"
    if file.is_file() and ".." not in file.parts:
        return file
    matches = [full_name for full_name in recipe_names() if full_name.rpartition("/")[2] == name]
    return root / f"{matches[0]}.yaml" if len(matches) == 1 else None


def beside(file: Path, name: str) -> Path:
    """Resolve a recipe's name in the ``defaults`` of another file.

    The name is a path relative to that file, or with `SCHEME` a shipped recipe.
    """
    if not name.startswith(SCHEME):
        return file.parent / name
    root = folder("recipes").resolve()
    shipped_file = (root / name.removeprefix(SCHEME)).resolve()
    if not shipped_file.is_relative_to(root):
        raise UserError(f"{name} is no name of a shipped recipe; `nemo-grpo recipe list` shows them")
    return shipped_file


def model(name: str) -> Path:
    """Find the Hugging Face folder of a shipped model, such as ``quickstart``.

    Raises: UserError: no model of this name comes with the package.
    """
    root = folder("recipes") / "policies"
    names = sorted(path.parent.name for path in root.glob("*/config.json"))
    if name not in names:
        raise UserError(
            f"${{{MODEL_RESOLVER}:{name}}}: no such model comes with the package{did_you_mean(name, names)}"
        )
    return (root / name).resolve()


def referenced_model(text: str) -> Path | None:
    """Find the model that ``${shipped_model:NAME}`` names; None for every other text.

    Raises: UserError: no model of this name comes with the package.
    """
    reference = _MODEL_REFERENCE.fullmatch(text)
    return None if reference is None else model(reference[1])


def _bare(name: str) -> str:
    """Strip the scheme and the ending from a recipe's name."""
    # The scheme may have lost a slash: `Path` merges its two slashes into one.
    return re.sub(f"^{SCHEME[:-1]}/*", "", name).removesuffix(".yaml")
