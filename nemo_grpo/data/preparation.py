"""Prepares a data set as one JSONL file with its pictures, and a manifest of its content and source."""

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nemo_grpo.data.fields import Entry, FieldMapping, Filter, Row
from nemo_grpo.data.manifest import read_manifest, write_manifest
from nemo_grpo.data.origins import Generated
from nemo_grpo.data.sources import SOURCES, Source, find_source
from nemo_grpo.support.errors import UserError, first_line
from nemo_grpo.support.files import flush, sha256_of
from nemo_grpo.tasks import Problem
from nemo_grpo.tasks.jsonl import as_line

FORMAT = 1
"""Format version of prepared files; a new number has all of them prepared again."""


@dataclass(frozen=True)
class Request:
    """Options of a preparation.

    Attributes:
        out: folder of the files.  revision: branch, tag or commit; None: the table's pin, or the newest.
        source: local copy of the repository, or a folder that holds such copies by data set name.
        generate: make problems here, if the data set has a generator.  force: prepare again if up to date.
        any_count: accept another number of problems than the paper or publisher states.
    """

    out: Path
    revision: str | None = None
    source: Path | None = None
    generate: bool = False
    force: bool = False
    any_count: bool = False

    def copy_of(self, source: Source) -> Path | None:
        """Find the local copy of a data set."""
        if self.source is None or isinstance(source.origin, Generated):
            return None
        if (self.source / source.name).is_dir():
            return self.source / source.name
        strangers = (other for other in SOURCES.values() if _repository(other) != _repository(source))
        if others := [other.name for other in strangers if (self.source / other.name).is_dir()]:
            raise UserError(
                f"--source {self.source} holds copies by name ({', '.join(others)}) and none of "
                f"{source.name}; put one into {self.source / source.name}, or give its folder alone"
            )
        return self.source


def _repository(source: Source) -> str:
    return getattr(source.origin, "repository", source.origin.label)


def check_copies(names: Sequence[str], request: Request) -> None:
    """Refuse one folder as the copy of several repositories."""
    if request.source is None or request.generate:
        return
    alike = [s for s in map(find_source, names) if request.copy_of(s) == request.source]
    if len(set(map(_repository, alike))) > 1:
        listed = " and ".join(source.name for source in alike)
        raise UserError(
            f"--source {request.source} would be the copy of {listed}, which are in different repositories; "
            f"put copies into {request.source}/NAME, or prepare one at a time"
        )


@dataclass(frozen=True)
class Prepared:
    """The prepared data set. ``fresh``: written by this call."""

    path: Path
    manifest: dict[str, Any]
    fresh: bool


def prepare(name: str, request: Request) -> Prepared:
    """Write ``<out>/<name>.jsonl`` and ``<out>/<name>.manifest.json``, or find them up to date.

    The manifest is written last: if it matches the file, the file is complete. Pictures go to
    ``<name>.images``.
    """
    source = find_source(name)
    if request.generate:
        return _prepare(source.generate(), replace(request, source=None))
    if find_spec("datasets") is None:
        raise UserError("nemo-grpo data prepare needs the datasets library; pip install 'nemo-grpo[data]'")
    return _prepare(source, request)


def _prepare(source: Source, request: Request) -> Prepared:
    path = request.out / f"{source.name}.jsonl"
    folder = request.copy_of(source)
    wanted = _wanted(source, request, folder)
    existing = read_manifest(path) or {}
    is_current = all(existing.get(key) == value for key, value in wanted.items()) and path.is_file()
    if is_current and not request.force and sha256_of(path) == existing.get("sha256"):
        _check_count(source, request, existing["num_problems"])
        return Prepared(path, existing, fresh=False)
    revision = wanted["requested_revision"] or "unknown (local copy)"
    try:
        if folder is None:
            revision = source.origin.resolve(wanted["requested_revision"])
    except Exception as error:  # exceptions differ between versions of the client libraries
        raise _unreachable(source, wanted["requested_revision"], None, error) from error
    try:
        request.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {request.out} cannot be made ({error.strerror}); choose another") from error
    rows = _rows(source, request, revision, folder)
    check = partial(_check_count, source, request)
    counts, num_images = write_problems(source, path, rows, check)
    manifest = {
        "name": source.name,
        "file": path.name,
        **wanted,
        "revision": revision,
        "filters": counts,
        "num_problems": counts[-1]["after"],
        "num_images": num_images,
        "sha256": sha256_of(path),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    write_manifest(path, manifest)
    return Prepared(path, manifest, fresh=True)


def _wanted(source: Source, request: Request, folder: Path | None) -> dict[str, Any]:
    """Return the parts of the manifest that are known in advance and determine the file's content."""
    return {
        "format": FORMAT,
        "task": source.task,
        "source": source.origin.label,
        "requested_revision": request.revision or source.origin.revision,
        "local_copy": str(folder) if folder else None,
        "rules": [filter.rule for filter in source.filters],
    }


def _rows(source: Source, request: Request, revision: str, folder: Path | None) -> Iterator[Row]:
    if folder is not None and not folder.is_dir():
        raise UserError(f"--source {folder} is not a folder; give the local copy of {source.origin.label}")
    try:
        yield from source.origin.rows(revision, folder)
    except Exception as error:
        raise _unreachable(source, request.revision or source.origin.revision, folder, error) from error


def _unreachable(source: Source, revision: str | None, folder: Path | None, error: Exception) -> UserError:
    reason = f"{type(error).__name__}: {first_line(error)}" if str(error) else type(error).__name__
    place = f"in --source {folder}" if folder else "from here"
    return UserError(
        f"{source.name}: {source.origin.label} cannot be read {place} ({reason}); on a machine with a "
        f"network, {source.origin.instructions(revision)}, then pass --source DIR (or set "
        "NEMO_GRPO_DATA_SOURCE=DIR)"
    )


def _check_count(source: Source, request: Request, count: int) -> None:
    expected = source.expected
    if expected is not None and not expected.matches(count) and not request.any_count:
        raise UserError(
            f"{source.name} has {count} problems, and {expected} are stated ({expected.stated}); the paper's "
            "steps and results are those of its own set: check --revision and --source, or take what is "
            "there with --any-count"
        )


SUFFIXES = {b"\x89PNG": ".png", b"\xff\xd8\xff": ".jpg", b"GIF8": ".gif", b"RIFF": ".webp", b"BM": ".bmp"}


def write_problems(
    source: Source, path: Path, rows: Iterable[Row], check: Callable[[int], None]
) -> tuple[list[dict[str, Any]], int]:
    """Write the file under a temporary name, then rename it; returns the filters' counts, number of images.

    Args: check: called with the number of problems before the file is renamed; raises to refuse it.
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
    """Write the picture unchanged; returns its file name."""
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
