"""Manifests: a file beside each data file with its content, source and hash, against which it is checked."""

import json
from pathlib import Path
from typing import Any

from nemo_grpo.support.errors import UserError
from nemo_grpo.support.files import sha256_of, write_atomically
from nemo_grpo.tasks.jsonl import read_problems

SUFFIX = ".manifest.json"


def manifest_path(path: Path) -> Path:
    """Return the path of a data file's manifest."""
    return path.with_suffix(SUFFIX)


def read_manifest(path: Path) -> dict[str, Any] | None:
    """Read a data file's manifest. Returns None if it is missing or cannot be read."""
    try:
        manifest = json.loads(manifest_path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) else None


def write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest of a data file. It appears complete or not at all."""
    write_atomically(manifest_path(path), json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")


def verify(folder: Path) -> dict[str, str | None]:
    """Check every data set of a folder: hash, number of problems, each line, each picture.

    Returns:
        Name of the data set -> its first fault, or None if it has none.
    """
    manifests = sorted(folder.glob(f"*{SUFFIX}"))
    if not manifests:
        raise UserError(
            f"{folder} holds no *{SUFFIX}; `nemo-grpo data prepare NAME --out {folder}` makes one"
        )
    names = [path.name.removesuffix(SUFFIX) for path in manifests]
    return {name: _complaint(folder / f"{name}.jsonl") for name in names}


def _complaint(path: Path) -> str | None:
    manifest = read_manifest(path)
    if manifest is None:
        return "the manifest cannot be read"
    if not path.is_file():
        return f"{path.name} is missing"
    if sha256_of(path) != manifest.get("sha256"):
        return f"{path.name} has a sha256 other than its manifest's"
    try:
        problems = read_problems([path], with_images=bool(manifest.get("num_images")))
    except UserError as error:
        return str(error)
    if len(problems) != manifest.get("num_problems"):
        return f"{len(problems)} problems, not {manifest.get('num_problems')}"
    return None
