"""A corpus, a JSONL file of passages that is read by line number, and the folder of its index."""

import json
import logging
import os
import shutil
import tempfile
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_grpo.support.errors import UserError
from nemo_grpo.support.files import publish_folder
from nemo_grpo.tasks.retriever import Passage
from nemo_grpo.tasks.rows import parse_object

log = logging.getLogger(__name__)

KEY = "key.json"


class Corpus(Sequence[Passage]):
    """The passages of a file, one JSON object per line; they are read when asked for, not kept in memory.

    Either ``{"id", "title", "text"}``, title and id optional, or ``{"id", "contents"}`` with the title as the
    first line of the contents. Blank lines are skipped.

    Args:   path: the file; it must not change while it is open.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._starts, self._numbers = array("q"), array("q")
        try:
            with self.path.open("rb") as file:
                position = 0
                for number, line in enumerate(file, 1):
                    if line.strip():
                        self._starts.append(position)
                        self._numbers.append(number)
                    position += len(line)
            self._starts.append(position)
            self._descriptor = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise UserError(f"corpus {self.path}: {error.strerror}; give a JSONL file of passages") from error
        if len(self) == 0:
            raise UserError(f"corpus {self.path} is empty; write one passage per line")

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        start, end = self._starts[index], self._starts[index + 1]
        line = os.pread(self._descriptor, end - start, start)  # no shared file position: safe in threads
        where = f"corpus {self.path}:{self._numbers[index]}"
        return passage_of(parse_object(line, where), index, where)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    @property
    def fingerprint(self) -> dict[str, int]:
        """Changes when the file does, without reading it."""
        status = self.path.stat()
        return {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns, "num_passages": len(self)}


def indexed_text(passage: Passage) -> str:
    """Return the text of a passage that an index reads."""
    return f"{passage.title}\n{passage.text}" if passage.title else passage.text


def passage_of(entry: Mapping[str, Any], index: int, where: str) -> Passage:
    """Read a passage from a corpus's line or a service's document.

    Args:   index: stands in for a missing id.  where: for messages.
    """
    title, text = entry.get("title") or "", entry.get("text")
    if text is None and isinstance(entry.get("contents"), str):
        first, newline, rest = entry["contents"].partition("\n")
        title, text = (first.strip().strip('"'), rest) if newline else ("", first)
    if not isinstance(text, str) or not isinstance(title, str):
        raise UserError(f'{where}: neither a "text" nor "contents"; a passage needs one of them, as a text')
    return Passage(str(entry.get("id", index)), title, text)


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
        try:
            publish_folder(unfinished, folder)
        except OSError:
            if _key_of(folder) != dict(key):  # not the same index by another process
                raise
        log.info("built in %.1f s", time.monotonic() - start)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _key_of(folder: Path) -> Any:
    try:
        return json.loads((folder / KEY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
