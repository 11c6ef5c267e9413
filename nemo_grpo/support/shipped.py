"""Files that come with the package: in a clone beside it, in an installed wheel within it."""

import re
from pathlib import Path

from nemo_grpo.support.errors import UserError, did_you_mean

SCHEME = "nemo_grpo://"
"""``defaults: nemo_grpo://base/embedded.yaml`` names a shipped recipe wherever the file lies."""


def folder(name: str) -> Path:
    """Find the shipped folder ``recipes``, ``slurm`` or ``requirements``."""
    package = Path(__file__).parents[1]
    found = next((path for path in (package / name, package.parent / name) if path.is_dir()), None)
    if found is None:
        raise UserError(f"{package / name} is missing; install the package again, by `pip install`")
    return found


def recipe_names() -> list[str]:
    """List shipped recipes without base files and sweeps, such as ``gpg/gpg-qwen2.5-32b-4n8g``."""
    root = folder("recipes")
    files = (path.relative_to(root) for path in root.rglob("*.yaml"))
    return sorted(str(path.with_suffix("")) for path in files if path.parts[0] not in ("base", "sweeps"))


def portable(recipe: Path) -> str:
    """Return a shipped recipe's text with ``defaults`` that are found from anywhere."""
    root = folder("recipes").resolve()

    def elsewhere(match: re.Match[str]) -> str:
        return SCHEME + (recipe.parent / match[0]).resolve().relative_to(root).as_posix()

    def line(match: re.Match[str]) -> str:
        return re.sub(r"[\w./-]+\.yaml", elsewhere, match[0])

    return re.sub(r"^defaults:[^#\n]*", line, recipe.read_text(encoding="utf-8"), flags=re.MULTILINE)


def recipe_file(given: str | Path) -> Path:
    """Find a recipe: the file itself, or the shipped one of that name (`named`)."""
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
    """Find the shipped recipe of a name, with or without `SCHEME`, folder and ending; None: no such one."""
    name, root = _bare(name), folder("recipes")
    if (file := root / f"{name}.yaml").is_file() and ".." not in file.parts:
        return file
    same = [known for known in recipe_names() if known.rpartition("/")[2] == name]
    return root / f"{same[0]}.yaml" if len(same) == 1 else None


def beside(file: Path, name: str) -> Path:
    """Resolve the recipe that another file names: relative to it, or with `SCHEME` a shipped one."""
    if not name.startswith(SCHEME):
        return file.parent / name
    root = folder("recipes").resolve()
    found = (root / name.removeprefix(SCHEME)).resolve()
    if not found.is_relative_to(root):
        raise UserError(f"{name} is no name of a shipped recipe; `nemo-grpo recipe list` shows them")
    return found


def model(name: str) -> Path:
    """Find the shipped model of a name, such as ``quickstart``: a Hugging Face folder.

    Raises: UserError: there is none of this name.
    """
    root = folder("recipes") / "policies"
    names = sorted(path.parent.name for path in root.glob("*/config.json"))
    if name not in names:
        raise UserError(
            f"${{shipped_model:{name}}}: no such model comes with the package{did_you_mean(name, names)}"
        )
    return (root / name).resolve()


def _bare(name: str) -> str:
    """Strip scheme (of which a `Path` keeps one slash) and ending from a name."""
    return re.sub(f"^{SCHEME[:-1]}/*", "", name).removesuffix(".yaml")
