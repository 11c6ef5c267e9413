"""Folder of a corpus's index, rebuilt unless it is complete and matches the corpus."""

import json
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nemo_grpo.support.errors import UserError

log = logging.getLogger(__name__)

KEY = "key.json"


def index_folder(folder: Path, key: Mapping[str, Any], build: Callable[[Path], None]) -> Path:
    """Return the folder with the index for ``key``; ``build`` fills it if it holds another one or none.

    The new index appears under its name in one step, after it is complete: a killed build leaves none, and
    two concurrent builds both end with a complete one.

    Args:   key: all that the index depends on, as JSON values.
    """
    if _key_of(folder) == dict(key):
        return folder
    if folder.exists() and not (folder / KEY).is_file():
        raise UserError(f"index folder {folder} holds something else; choose another, or remove it")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise UserError(
            f"index folder {folder} cannot be made: {error.strerror}; choose another one (--cache)"
        ) from error
    try:
        start = time.monotonic()
        log.info("building the index %s", folder)
        build(unfinished)
        (unfinished / KEY).write_text(json.dumps(dict(key), sort_keys=True) + "\n", encoding="utf-8")
        _publish(unfinished, folder, key)
        log.info("built in %.1f s", time.monotonic() - start)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _key_of(folder: Path) -> Any:
    try:
        return json.loads((folder / KEY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _publish(unfinished: Path, folder: Path, key: Mapping[str, Any]) -> None:
    if folder.exists():
        stale = Path(tempfile.mkdtemp(prefix=f".{folder.name}-stale-", dir=folder.parent))
        folder.replace(stale / folder.name)
        shutil.rmtree(stale, ignore_errors=True)
    try:
        unfinished.rename(folder)
    except OSError:
        if _key_of(folder) != dict(key):  # not the same index by another process
            raise
