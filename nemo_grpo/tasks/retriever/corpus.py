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

    Args:
        path: the file; it must not change while it is open.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        # Arrays have 8 bytes per number; for millions of passages lists of integers would need five times as
        # much.
        self._starts = array("q")
        self._line_numbers = array("q")
        try:
            with self.path.open("rb") as file:
                position = 0
                for number, line in enumerate(file, 1):
                    if line.strip():
                        self._starts.append(position)
                        self._line_numbers.append(number)
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
            return [self[number] for number in range(*index.indices(len(self)))]
        # A negative index counts from the end, and one beyond the corpus raises IndexError.
        index = range(len(self))[index]
        start = self._starts[index]
        end = self._starts[index + 1]
        # pread takes the position as an argument; threads would share the position of `read`.
        line = os.pread(self._descriptor, end - start, start)
        where = f"corpus {self.path}:{self._line_numbers[index]}"
        return passage_of(parse_object(line, where), index, where)

    def __del__(self) -> None:
        # The attribute does not exist if the constructor has failed.
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    @property
    def fingerprint(self) -> dict[str, int]:
        """Return values that change when the file does, without reading it."""
        status = self.path.stat()
        return {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns, "num_passages": len(self)}


def indexed_text(passage: Passage) -> str:
    """Return the text of a passage that an index reads."""
    return f"{passage.title}\n{passage.text}" if passage.title else passage.text


def passage_of(entry: Mapping[str, Any], index: int, where: str) -> Passage:
    """Read a passage from a corpus's line or a service's document.

    Args:
        entry: the line or document.
        index: stands in for a missing id.
        where: place of the entry, for messages.
    """
    title = entry.get("title") or ""
    text = entry.get("text")
    contents = entry.get("contents")
    if text is None and isinstance(contents, str):
        # Search-R1's corpora have the title, in quotation marks, as the first line.
        first_line, line_break, further_lines = contents.partition("\n")
        if line_break:
            title = first_line.strip().strip('"')
            text = further_lines
        else:
            title = ""
            text = contents
    if not isinstance(text, str) or not isinstance(title, str):
        raise UserError(f'{where}: neither a "text" nor "contents"; a passage needs one of them, as a text')
    return Passage(str(entry.get("id", index)), title, text)


def index_folder(folder: Path, key: Mapping[str, Any], build: Callable[[Path], None]) -> None:
    """Build the index for ``key``, unless the folder holds it already.

    The new index appears under its name in one step, after it is complete: a killed build leaves none, and
    two concurrent builds both end with a complete one.

    Args:
        folder: folder of the index.
        key: all that the index depends on, as JSON values.
        build: writes the index into the folder that it gets.
    """
    if _key_of(folder) == dict(key):
        return
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
            # Another process may have published the same index in the meantime, which is just as good.
            if _key_of(folder) != dict(key):
                raise
        log.info("built in %.1f s", time.monotonic() - start)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _key_of(folder: Path) -> Any:
    try:
        return json.loads((folder / KEY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
