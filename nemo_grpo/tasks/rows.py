"""Rows of JSONL and Parquet files, and the `Problem` that a row's columns hold.

A row without an id gets the file's name and the row's number as id. An id or an answer may be a number, and a
question may be a conversation. GSM8K's answers are worked solutions that end in ``#### 42``: the answer
becomes 42, and the solution metadata.solution. Other columns go to the metadata.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from nemo_grpo.support.dotted import value_of
from nemo_grpo.support.errors import UserError, first_line
from nemo_grpo.tasks.base import Message, Problem

PARQUET = ".parquet"
Key = Literal["id", "question", "answer"]
Row = Mapping[str, Any]
Columns = Mapping[Key, str]
"""Key of a problem -> its column, by default the one of the same name; dots lead into nested fields."""


class Rule(NamedTuple):
    """Rule for a key's value.

    Attributes:
        types: allowed types besides text.
        rule: the rule in words.
    """

    types: tuple[type, ...]
    rule: str


REQUIRED: Mapping[Key, Rule] = {
    "id": Rule((int,), "a non-empty text or a whole number"),
    "question": Rule((), "a non-empty text, or a list of messages with role and content"),
    "answer": Rule((int, float), "a non-empty text or a number"),
}
OTHER_NAMES: Mapping[Key, tuple[str, ...]] = {
    "question": ("problem", "prompt", "messages"),
    "answer": ("solution", "ground_truth", "final_answer", "reward_model.ground_truth"),
}
"""Names in the data sets of TRL, verl, NeMo-RL and open-r1, to propose where a column is missing."""
_CALCULATOR = re.compile(r"<<[^<>\n]*>>")
_WORKED = re.compile(r"(|.*\s)####(?!#)([^\n]*)\s*", re.DOTALL)


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read the rows of a file, numbered from 1; blank lines of JSONL are skipped."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; {_how_to_write(path)}")
    rows = _parquet(path) if path.suffix == PARQUET else _json_lines(path)
    try:
        yield from rows
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror or first_line(error)}; `nemo-grpo data prepare NAME --out DIR` writes "
            "such files"
        ) from error


def _how_to_write(folder: Path) -> str:
    """Write the remedy for a folder that a recipe names as a file."""
    # The marks of the library datasets: a dict of splits, or one split.
    is_dataset_dict = (folder / "dataset_dict.json").is_file()
    is_dataset = (folder / "dataset_info.json").is_file()
    if not (is_dataset_dict or is_dataset):
        return "name its files"
    split = '["train"]' if is_dataset_dict else ""
    return (
        f"write a file with datasets: `load_from_disk({str(folder)!r}){split}.to_parquet({folder.name!r} + "
        "'.parquet')`, and name that"
    )


def _json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    row = parse_object(line, f"{path}:{number}")
                    # Half of a character can only come from an escape, because the file is valid UTF-8.
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
                    number += 1
                    yield number, row
    except ArrowInvalid as error:
        raise UserError(f"{path}: not Parquet ({first_line(error)}); write it again") from error


def parse_object(line: str | bytes, where: str) -> dict[str, Any]:
    """Parse one line as a JSON object."""
    array_message = f"{where}: a JSON array; write one object per line, as `jq -c .[]` does"
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        # An array over several lines: its first line is not JSON by itself.
        if isinstance(error, ValueError) and line.lstrip()[:1] in ("[", b"["):
            raise UserError(array_message) from error
        raise UserError(f"{where}: not JSON ({error}); write one object per line") from error
    if isinstance(entry, list):
        raise UserError(array_message)
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


def problem_of(row: Row, columns: Columns, where: str) -> Problem:
    """Make the problem that a row holds.

    Args:
        row: the row's columns.
        columns: see `Columns`.
        where: file and number of the row, ``path:number``.
    """
    names = _names(row, columns)
    values = {key: _value(row, name) for key, name in names.items() if has_column(row, name)}
    values.setdefault("id", where.rpartition("/")[2])
    history: list[Message] = []
    if isinstance(values.get("question"), list):
        history = _split_conversation(values, where)
    for key in REQUIRED:
        if key not in values:
            raise UserError(_missing_column(row, columns, key, names[key], where))
    texts = {key: _text(key, value, where) for key, value in values.items()}
    metadata = _metadata(row, names, where)
    worked = worked_answer(texts["answer"])
    if worked is not None:
        solution, answer = worked
        if not answer:
            raise UserError(f"{where}: answer ends in '####' without an answer; write it there, as '#### 42'")
        texts["answer"] = answer
        metadata = {"solution": solution} | metadata
    return Problem(**texts, metadata=metadata, history=tuple(history))


def _split_conversation(values: dict[Key, Any], where: str) -> list[Message]:
    """Replace the conversation in ``question`` by its last user message, and return the messages before it.

    If the row has no answer, a reply of the assistant at the end becomes the answer.
    """
    *history, last = _messages(values["question"], where)
    if last["role"] == "assistant" and history and "answer" not in values:
        values["answer"] = last["content"]
        *history, last = history
    if last["role"] != "user":
        raise UserError(f"{where}: the last message has role {last['role']}; end with the user's")
    values["question"] = last["content"]
    return history


def _missing_column(row: Row, columns: Columns, key: Key, name: str, where: str) -> str:
    """Write the message about a row without the column ``name`` of ``key``."""
    remedy = _remedy(row, columns)
    if remedy is None:
        remedy = (
            f"name its column, nemo_grpo.task.columns: {{{key}: COLUMN}}; it must be {REQUIRED[key].rule}"
        )
    return f"{where}: {name} is missing among {', '.join(row) or 'no keys'}; {remedy}"


def _metadata(row: Row, names: Mapping[Key, str], where: str) -> dict[str, Any]:
    """Merge the row's unused columns with its ``metadata``, which takes precedence."""
    metadata = row.get("metadata")
    if not isinstance(metadata, dict | None):
        raise UserError(f"{where}: metadata={metadata!r} must be an object")
    used_columns = {*names.values(), "metadata"}
    unused = {name: value for name, value in row.items() if name not in used_columns}
    return unused | (metadata or {})


def _names(row: Row, columns: Columns) -> dict[Key, str]:
    """Return the column of each key: by the mapping, unless the row has the standard names instead.

    Training and validation files share the mapping, and often only one of them needs it.
    """
    has_mapped_columns = any(has_column(row, column) for column in columns.values())
    has_standard_columns = has_column(row, "question") and has_column(row, "answer")
    if has_standard_columns and not has_mapped_columns:
        return {key: key for key in REQUIRED}
    return {key: columns.get(key, key) for key in REQUIRED}


def _text(key: Key, value: Any, where: str) -> str:
    types, rule = REQUIRED[key]
    # `type` instead of isinstance, which counts True as an integer. The comparison refuses NaN and Infinity,
    # which Python's JSON reads; math.isfinite would fail on an integer beyond the range of a float.
    if type(value) in types and abs(value) < math.inf:
        return str(value)
    if isinstance(value, str) and value.strip():
        return value
    raise UserError(f"{where}: {key}={json.dumps(value, default=str)} must be {rule}")


def _remedy(row: Row, columns: Columns) -> str | None:
    """Propose the line of the recipe that names the missing columns, if the row has some of `OTHER_NAMES`."""
    proposed = dict(columns)
    for key, names in OTHER_NAMES.items():
        present_names = [name for name in names if has_column(row, name)]
        if present_names and not has_column(row, columns.get(key, key)):
            proposed[key] = present_names[0]
    if proposed == columns:
        return None
    line = ", ".join(f"{key}: {name}" for key, name in proposed.items())
    return f"write nemo_grpo.task.columns: {{{line}}}"


def has_column(row: Row, name: str) -> bool:
    """Return True if a row has a column; dots lead into nested fields."""
    return name in row or ("." in name and value_of(row, name) is not None)


def _value(row: Row, name: str) -> Any:
    return row[name] if name in row else value_of(row, name)


def _messages(conversation: Sequence[Any], where: str) -> list[Message]:
    """Check the messages of a conversation; contents become texts."""
    rule = "a message is {role, content}, its content a text; paths of images go to the column images"
    messages: list[Message] = []
    for message in conversation:
        fields = message if isinstance(message, dict) else {}
        role = fields.get("role")
        content = fields.get("content")
        if isinstance(content, list):
            content = _joined_parts(content)
        if not isinstance(role, str) or not isinstance(content, str):
            raise UserError(f"{where}: {json.dumps(message, default=str)[:200]}: {rule}")
        messages.append({"role": role, "content": content})
    if not messages:
        raise UserError(f"{where}: a conversation without messages; {rule}")
    return messages


def _joined_parts(parts: Sequence[Any]) -> str | None:
    """Join a content in OpenAI's form, ``[{type: text, text: ..}]``; None if a part is no text."""
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(part_text, str) for part_text in texts):
        return None
    return "".join(map(str, texts))


def worked_answer(answer: str) -> tuple[str, str] | None:
    """Split GSM8K's form into solution and answer, ``.. <<1+1=2>> .. #### 1,234``, on one line or several.

    The calculator's notes and the commas between digits are left out. An answer in another form gives None.
    """
    match = _WORKED.fullmatch(answer)
    if match is None:
        return None
    solution, final = match.groups()
    without_notes = _CALCULATOR.sub("", solution).strip()
    without_commas = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", final.strip())
    return without_notes, without_commas
