"""Checks of a job in a container: can Pyxis mount its folders, and are all of its files in one of them?"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from nemo_grpo.recipe import Recipe
from nemo_grpo.recipe.loader import OVERRIDE
from nemo_grpo.run.continuation import data_files
from nemo_grpo.support import shipped
from nemo_grpo.support.errors import UserError

SEPARATORS = re.compile(r"[\s,:]")
"""Characters that srun and Pyxis read as the end of a path (NVIDIA/pyxis issue 133 for the space)."""


def check_paths(root: Path, environment: Mapping[str, str], run_name: str) -> None:
    """Refuse an image or mounts whose paths Pyxis would misread. Without a container nothing is checked.

    Args:
        root: folder of the repository with the job scripts.
        environment: the job's CONTAINER, MOUNTS and LOGS.
        run_name: name of the run, and of the folder with its logs.
    """
    image = environment.get("CONTAINER")
    if not image:
        return
    if re.search(r"\s", image):
        raise UserError(f"--container {image!r}: Pyxis takes no space in an image's path; rename its folder")
    mounted = {
        "the folder of the job scripts": root,
        "this folder": Path.cwd(),
        "--logs": _logs(environment) / run_name,
    }
    for name, folder in mounted.items():
        if SEPARATORS.search(str(folder)):
            raise UserError(
                f"{name}, {str(folder)!r}, is mounted in the container, and Pyxis takes no space, comma or "
                "colon in a path; rename it, or use another one"
            )
    for entry in _entries(environment):
        if re.search(r"\s", entry) or entry.count(":") not in (1, 2):
            raise UserError(
                f"--mounts: {entry!r} is not FROM:TO or FROM:TO:FLAGS, with commas between several mounts "
                "and no space, comma or colon in a path; rename the folder"
            )


def hidden_files(
    recipe: Recipe, file: Path, root: Path, environment: Mapping[str, str]
) -> Iterator[tuple[str, Path]]:
    """Find what a job in this container reads or writes outside the folders that are mounted.

    Args:
        recipe: recipe of the job.
        file: file of the recipe.
        root: see `check_paths`.
        environment: see `check_paths`.

    Yields:
        The recipe's key or a description of the path, and the path with links resolved.
    """
    visible = [root.resolve(), Path.cwd().resolve(), _logs(environment).resolve()]
    for entry in _entries(environment):
        source, target = entry.split(":")[:2]
        # The recipe names paths of this machine, so a folder counts only if it has the same path inside.
        if source == target:
            visible.append(Path(source).resolve())
    for name, path in _paths_of(recipe, file):
        # Links are resolved, because a link that leads out of a mounted folder is broken inside.
        resolved = path.resolve()
        if not any(resolved.is_relative_to(folder) for folder in visible):
            yield name, resolved


def hidden_cache(recipe: Recipe, environment: Mapping[str, str]) -> bool:
    """Return True if a job would download its model from the Hub again in every container.

    Hugging Face's default cache is in the home folder, which is not mounted. Only an HF_HOME in a mounted
    folder keeps the model.
    """
    model = recipe.policy.model_name
    if model is None or Path(model).is_dir():
        return False
    cache = os.environ.get("HF_HOME")
    if cache is None:
        return True
    targets = [entry.split(":")[1] for entry in _entries(environment)]
    return not any(Path(cache).is_relative_to(target) for target in targets)


def notes(recipe: Recipe, file: Path, root: Path, environment: Mapping[str, str]) -> list[str]:
    """Describe what a job in this container would not find, one sentence each with the remedy."""
    if not environment.get("CONTAINER"):
        return []
    sentences = []
    for name, path in hidden_files(recipe, file, root, environment):
        mount = f"{path.parent}:{path.parent}"
        sentences.append(f"{name} {path} is not mounted: add --mounts {mount}, unless the image has it")
    if hidden_cache(recipe, environment):
        sentences.append(
            f"policy.model_name={recipe.policy.model_name} is read through Hugging Face's cache, and the "
            "home folder is not mounted: export HF_HOME=DIR, a folder that all nodes share, and add "
            "--mounts DIR:DIR"
        )
    return sentences


def _logs(environment: Mapping[str, str]) -> Path:
    return Path(environment.get("LOGS") or "logs").absolute()


def _entries(environment: Mapping[str, str]) -> list[str]:
    return [entry for entry in environment.get("MOUNTS", "").split(",") if entry]


def _paths_of(recipe: Recipe, file: Path) -> Iterator[tuple[str, Path]]:
    """List the files and folders that a recipe's job reads or writes."""
    package = shipped.folder("recipes").resolve()
    bases = {Path(name) for name in recipe.source.origins.values() if name != OVERRIDE}
    for path in sorted(bases | {file.resolve()}):
        # The package in the container contains the shipped recipes.
        if not path.is_relative_to(package):
            yield "recipe", path
    model = recipe.policy.model_name
    if model is not None and Path(model).is_dir():
        yield "policy.model_name", Path(model)
    for path in data_files(recipe).values():
        yield "data", path
    yield "run folder", recipe.run_dir
    if recipe.checkpointing.enabled:
        yield "checkpointing.checkpoint_dir", recipe.checkpoint_dir
