"""Preparation of a data set: one JSONL file, its pictures, and a manifest of its content and source."""

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
        out: folder of the files.
        revision: branch, tag or commit; by default the one that `sources.yaml` pins, or else the newest.
        source: local copy of the repository, or a folder with such copies, each named after its data set.
        generate: generate the problems, if the data set has a generator.
        force: prepare data sets again that are up to date.
        any_count: accept a number of problems that differs from the one that the paper or publisher states.
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
        # A folder of copies by name is no copy itself. Data sets of one repository may share its copy.
        copies = []
        for candidate in SOURCES.values():
            if _repository(candidate) != _repository(source) and (self.source / candidate.name).is_dir():
                copies.append(candidate.name)
        if copies:
            raise UserError(
                f"--source {self.source} holds copies by name ({', '.join(copies)}) and none of "
                f"{source.name}; put one into {self.source / source.name}, or give its folder alone"
            )
        return self.source


def _repository(source: Source) -> str:
    return getattr(source.origin, "repository", source.origin.label)


def check_copies(names: Sequence[str], request: Request) -> None:
    """Refuse a --source folder if the named data sets come from several repositories: it can only be one."""
    if request.source is None or request.generate:
        return
    sources = [find_source(name) for name in names]
    same_copy = [source for source in sources if request.copy_of(source) == request.source]
    repositories = {_repository(source) for source in same_copy}
    if len(repositories) > 1:
        listed = " and ".join(source.name for source in same_copy)
        raise UserError(
            f"--source {request.source} would be the copy of {listed}, which are in different repositories; "
            f"put copies into {request.source}/NAME, or prepare one at a time"
        )


@dataclass(frozen=True)
class Prepared:
    """The prepared data set.

    Attributes:
        path: path of the JSONL file.
        manifest: content of its manifest.
        fresh: True if this call wrote the file; False if it was up to date.
    """

    path: Path
    manifest: dict[str, Any]
    fresh: bool


def prepare(name: str, request: Request) -> Prepared:
    """Write ``<out>/<name>.jsonl`` and ``<out>/<name>.manifest.json``, unless they are up to date.

    Pictures go to ``<name>.images``. The manifest is written last, so that a file with a matching manifest is
    complete.
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
    conditions = _conditions(source, request, folder)
    existing = read_manifest(path) or {}
    is_current = all(existing.get(key) == value for key, value in conditions.items()) and path.is_file()
    # The hash tells whether somebody has edited the file. It comes last, because it reads the whole file.
    if is_current and not request.force and sha256_of(path) == existing.get("sha256"):
        _check_count(source, request, existing["num_problems"])
        return Prepared(path, existing, fresh=False)
    requested = conditions["requested_revision"]
    revision = requested or "unknown (local copy)"
    if folder is None:
        try:
            revision = source.origin.resolve(requested)
        # Any exception, because versions of the client libraries raise different ones.
        except Exception as error:
            raise _unreachable(source, requested, None, error) from error
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
        **conditions,
        "revision": revision,
        "filters": counts,
        "num_problems": counts[-1]["after"],
        "num_images": num_images,
        "sha256": sha256_of(path),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    write_manifest(path, manifest)
    return Prepared(path, manifest, fresh=True)


def _conditions(source: Source, request: Request, folder: Path | None) -> dict[str, Any]:
    """Return the part of the manifest that decides the file's content and is known before the download."""
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
    reason = type(error).__name__
    if str(error):
        reason += f": {first_line(error)}"
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
    """Write the file under a temporary name, then rename it.

    Args:
        source: the data set.
        path: path of the file; its images go into a folder beside it.
        rows: published rows.
        check: called with the number of problems before the file is renamed. An exception refuses the file.

    Returns:
        The counts of each filter, and the number of images.
    """
    temporary = path.with_suffix(".jsonl.tmp")
    images = path.with_suffix(".images")
    temporary_images = path.with_suffix(".images.tmp")
    # A command that was killed may have left images.
    shutil.rmtree(temporary_images, ignore_errors=True)
    num_images = 0
    chain = _Chain(source.filters)
    try:
        with temporary.open("w", encoding="utf-8") as file:
            for number, entry in chain.run(_entries(source.name, source.mapping, rows)):
                metadata = dict(entry.metadata)
                paths = []
                for image_number, image in enumerate(entry.images):
                    name = _write_image(image, temporary_images, f"{number:06d}-{image_number}")
                    paths.append(f"{images.name}/{name}")
                if paths:
                    metadata["images"] = paths
                num_images += len(paths)
                problem = Problem(f"{source.name}-{number}", entry.question, entry.answer, metadata)
                file.write(as_line(problem))
        check(chain.counts()[-1]["after"])
        flush(temporary)
    # BaseException, so that Ctrl-C also removes the unfinished files.
    except BaseException:
        temporary.unlink(missing_ok=True)
        shutil.rmtree(temporary_images, ignore_errors=True)
        raise
    shutil.rmtree(images, ignore_errors=True)
    if num_images:
        temporary_images.rename(images)
    # The JSONL file is renamed last, so that its images exist as soon as it does.
    temporary.replace(path)
    return chain.counts(), num_images


def _entries(name: str, mapping: FieldMapping, rows: Iterable[Row]) -> Iterator[tuple[int, Entry]]:
    """Map the rows to entries, each with the number of its row.

    The id of a problem contains that number, so it does not depend on the filters.
    """
    for number, row in enumerate(rows):
        try:
            yield number, mapping(row)
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise UserError(
                f"{name}: row {number} is not as expected ({type(error).__name__}: {error}); its columns are "
                f"{', '.join(map(str, row))}: choose another --revision"
            ) from error


class _Chain:
    """Filters that are applied in order, with the numbers of entries before and after each."""

    def __init__(self, filters: tuple[Filter, ...]) -> None:
        self._filters = filters
        self._tests = [filter.build() for filter in filters]
        # Number i counts the entries that have reached filter i. The last one counts those that passed all.
        self._num_reached = [0] * (len(filters) + 1)

    def run(self, entries: Iterable[tuple[int, Entry]]) -> Iterator[tuple[int, Entry]]:
        """Yield the numbered entries that pass all filters."""
        for number, entry in entries:
            if self._passes(entry):
                yield number, entry

    def _passes(self, entry: Entry) -> bool:
        for index, test in enumerate(self._tests):
            self._num_reached[index] += 1
            if not test(entry):
                return False
        self._num_reached[-1] += 1
        return True

    def counts(self) -> list[dict[str, Any]]:
        """Return each filter's rule, with the entries before and after it."""
        counts = []
        for index, filter in enumerate(self._filters):
            before = self._num_reached[index]
            after = self._num_reached[index + 1]
            counts.append({"rule": filter.rule, "cited": filter.cited, "before": before, "after": after})
        return counts


def _write_image(image: Any, folder: Path, stem: str) -> str:
    """Write the picture's bytes unchanged; returns the name of the file."""
    if isinstance(image, dict):
        content = image.get("bytes") or Path(image["path"]).read_bytes()
    else:
        content = bytes(image)
    # The first bytes decide the suffix, because a record may have no path, or one without a suffix.
    suffixes = [suffix for magic, suffix in SUFFIXES.items() if content.startswith(magic)]
    if not suffixes:
        raise UserError(f"{folder.stem}: image {stem} is neither PNG, JPEG, GIF, WebP nor BMP")
    name = f"{stem}{suffixes[0]}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    return name
