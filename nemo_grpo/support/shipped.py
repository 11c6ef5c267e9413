"""Files that come with the package: in a clone beside it, in an installed wheel within it."""

import re
from pathlib import Path

from nemo_grpo.support.errors import UserError, did_you_mean

SCHEME = "nemo_grpo://"
"""``defaults: nemo_grpo://base/embedded.yaml`` names a shipped recipe wherever the file lies."""


def folder(name: str) -> Path:
    """The shipped folder ``recipes``, ``slurm`` or ``requirements``.

    Raises: UserError: this installation lacks it.
    """
    package = Path(__file__).parents[1]
    found = next((path for path in (package / name, package.parent / name) if path.is_dir()), None)
    if found is None:
        raise UserError(f"{package / name} is missing; install the package again, by `pip install`")
    return found


def recipe_names() -> list[str]:
    """Shipped recipes without base files and sweeps, as ``quickstart`` and ``gpg/gpg-qwen2.5-32b-4n8g``."""
    root = folder("recipes")
    files = (path.relative_to(root) for path in root.rglob("*.yaml"))
    return sorted(str(path.with_suffix("")) for path in files if path.parts[0] not in ("base", "sweeps"))


def portable(recipe: Path) -> str:
    """The text of a shipped recipe whose ``defaults`` are found from anywhere."""
    root = folder("recipes").resolve()

    def elsewhere(match: re.Match[str]) -> str:
        return SCHEME + (recipe.parent / match[0]).resolve().relative_to(root).as_posix()

    def line(match: re.Match[str]) -> str:
        return re.sub(r"[\w./-]+\.yaml", elsewhere, match[0])

    return re.sub(r"^defaults:[^#\n]*", line, recipe.read_text(encoding="utf-8"), flags=re.MULTILINE)


def recipe_file(given: str | Path) -> Path:
    """A recipe on this machine: the file itself, or the shipped one of that name (`named`).

    Raises: UserError: it is neither.
    """
    file = Path(given) if Path(given).exists() else named(str(given))
    if file is None:
        known = {name.rpartition("/")[2] for name in recipe_names()}
        near = did_you_mean(Path(_bare(str(given))).name, known)
        raise UserError(
            f"{given}: No such file, nor a shipped recipe of that name"
            f"{near if near.startswith('; did') else ''}; `nemo-grpo recipe list` shows them"
        )
    return file


def named(name: str) -> Path | None:
    """The shipped recipe of a name, with or without `SCHEME`, folder and ``.yaml``; None: there is none."""
    name, root = _bare(name), folder("recipes")
    if (file := root / f"{name}.yaml").is_file() and ".." not in file.parts:
        return file
    same = [known for known in recipe_names() if known.rpartition("/")[2] == name]
    return root / f"{same[0]}.yaml" if len(same) == 1 else None


def beside(file: Path, name: str) -> Path:
    """The recipe that another file names: relative to it, or with `SCHEME` a shipped one. It may not exist.

    Raises: UserError: the name leads out of the shipped recipes.
    """
    if not name.startswith(SCHEME):
        return file.parent / name
    root = folder("recipes").resolve()
    found = (root / name.removeprefix(SCHEME)).resolve()
    if not found.is_relative_to(root):
        raise UserError(f"{name} is no name of a shipped recipe; `nemo-grpo recipe list` shows them")
    return found


def _bare(name: str) -> str:
    """A name without scheme, of which a `Path` keeps one slash, and ending."""
    return re.sub(f"^{SCHEME[:-1]}/*", "", name).removesuffix(".yaml")
