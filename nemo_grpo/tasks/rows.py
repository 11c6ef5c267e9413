"""Rows of JSONL and Parquet files."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo_grpo.support.errors import UserError, first_line

PARQUET = ".parquet"


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read the rows of a file, numbered from 1; blank lines of JSONL are skipped.

    Raises: UserError: the file is missing or damaged, or a line is no object; the message names the place.
    """
    try:
        yield from _parquet(path) if path.suffix == PARQUET else _json_lines(path)
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror or first_line(error)}; `nemo-grpo data prepare NAME --out DIR` writes "
            "such files"
        ) from error


def _json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    row = parse_object(line, f"{path}:{number}")
                    if "\\u" in line:
                        _check_characters(row, f"{path}:{number}")
                    yield number, row
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 ({error.reason} at byte {error.start}); convert it") from error


def _parquet(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise UserError(f"{path}: Parquet needs pyarrow; pip install 'nemo-grpo[data]'") from error
    number = 0
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    yield (number := number + 1), row
    except ArrowInvalid as error:
        raise UserError(f"{path}: not Parquet ({first_line(error)}); write it again") from error


def parse_object(line: str | bytes, where: str) -> dict[str, Any]:
    """One line as an object.

    Raises: UserError: it is none; the message begins with ``where``.
    """
    array = f"{where}: a JSON array; write one object per line, as `jq -c .[]` does"
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        if isinstance(error, ValueError) and line.lstrip()[:1] in ("[", b"["):
            raise UserError(array) from error
        raise UserError(f"{where}: not JSON ({error}); write one object per line") from error
    if isinstance(entry, list):
        raise UserError(array)
    if not isinstance(entry, dict):
        raise UserError(f"{where}: {type(entry).__name__} instead of an object; write one object per line")
    return entry


def _check_characters(entry: dict[str, Any], where: str) -> None:
    """Refuse lone surrogates: valid JSON, but no tokenizer or UTF-8 file accepts them."""
    try:
        json.dumps(entry, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise UserError(
            f"{where}: {half} is half of a character (a lone surrogate); correct the text"
        ) from error
