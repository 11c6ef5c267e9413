"""The note beside a data file: what it holds, where that came from, and its hash."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nemo_grpo.files import write_atomically

SUFFIX = ".manifest.json"


def manifest_path(path: Path) -> Path:
    """``x.jsonl`` -> ``x.manifest.json``."""
    return path.with_suffix(SUFFIX)


def read_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest of a data file; None if there is none that can be read."""
    try:
        manifest = json.loads(manifest_path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) else None


def write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest of a data file, under a temporary name first."""
    write_atomically(manifest_path(path), json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")
