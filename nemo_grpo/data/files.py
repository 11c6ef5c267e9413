"""JSONL file of a data set with its pictures: published rows after mapping and filters."""

import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from nemo_grpo.data.fields import Entry, FieldMapping, Row
from nemo_grpo.data.filters import Filter
from nemo_grpo.data.sources import Source
from nemo_grpo.support.errors import UserError
from nemo_grpo.support.files import flush
from nemo_grpo.tasks import Problem
from nemo_grpo.tasks.jsonl import as_line

SUFFIXES = {b"\x89PNG": ".png", b"\xff\xd8\xff": ".jpg", b"GIF8": ".gif", b"RIFF": ".webp", b"BM": ".bmp"}


def write_problems(
    source: Source, path: Path, rows: Iterable[Row], check: Callable[[int], None]
) -> tuple[list[dict[str, Any]], int]:
    """Write the file under a temporary name, then rename. Returns: the filters' counts, number of images.

    Args: check: gets the number of problems before the file is renamed; raises to refuse it.
    """
    temporary, images = path.with_suffix(".jsonl.tmp"), path.with_suffix(".images")
    new_images = path.with_suffix(".images.tmp")
    shutil.rmtree(new_images, ignore_errors=True)
    num_images = 0
    chain = _Chain(source.filters)
    try:
        with temporary.open("w", encoding="utf-8") as file:
            for number, entry in chain.run(_entries(source.name, source.mapping, rows)):
                names = [
                    _write_image(image, new_images, f"{number:06d}-{i}")
                    for i, image in enumerate(entry.images)
                ]
                num_images += len(names)
                where = {"images": [f"{images.name}/{name}" for name in names]} if names else {}
                content = entry.question, entry.answer, {**entry.metadata, **where}
                file.write(as_line(Problem(f"{source.name}-{number}", *content)))
        check(chain.counts()[-1]["after"])
        flush(temporary)
    except BaseException:
        temporary.unlink(missing_ok=True)
        shutil.rmtree(new_images, ignore_errors=True)
        raise
    shutil.rmtree(images, ignore_errors=True)
    if num_images:
        new_images.rename(images)
    temporary.replace(path)
    return chain.counts(), num_images


def _entries(name: str, mapping: FieldMapping, rows: Iterable[Row]) -> Iterator[tuple[int, Entry]]:
    for number, row in enumerate(rows):
        try:
            yield number, mapping(row)
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise UserError(
                f"{name}: row {number} is not as expected ({type(error).__name__}: {error}); its columns are "
                f"{', '.join(map(str, row))}: choose another --revision"
            ) from error


class _Chain:
    """Filters in order, with counts of the entries before and after each."""

    def __init__(self, filters: tuple[Filter, ...]) -> None:
        self._filters = filters
        self._keeps = [filter.build() for filter in filters]
        self._met = [0] * (len(filters) + 1)

    def run(self, entries: Iterable[tuple[int, Entry]]) -> Iterator[tuple[int, Entry]]:
        for number, entry in entries:
            for index, keep in enumerate(self._keeps):
                self._met[index] += 1
                if not keep(entry):
                    break
            else:
                self._met[-1] += 1
                yield number, entry

    def counts(self) -> list[dict[str, Any]]:
        return [
            {"rule": filter.rule, "cited": filter.cited, "before": before, "after": after}
            for filter, before, after in zip(self._filters, self._met, self._met[1:], strict=False)
        ]


def _write_image(image: Any, folder: Path, stem: str) -> str:
    """Write the picture unchanged. Returns: its file name."""
    if isinstance(image, dict):
        content = image.get("bytes") or Path(image["path"]).read_bytes()
    else:
        content = bytes(image)
    suffix = next((end for start, end in SUFFIXES.items() if content.startswith(start)), None)
    if suffix is None:
        raise UserError(f"{folder.stem}: image {stem} is neither PNG, JPEG, GIF, WebP nor BMP")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}{suffix}").write_bytes(content)
    return f"{stem}{suffix}"
