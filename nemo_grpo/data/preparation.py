"""Prepares a data set as one JSONL file and a manifest of its content and source."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nemo_grpo.data.fields import Row
from nemo_grpo.data.files import write_problems
from nemo_grpo.data.manifest import read_manifest, write_manifest
from nemo_grpo.data.origins import Generated
from nemo_grpo.data.sources import SOURCES, Source, find_source
from nemo_grpo.support.errors import UserError, first_line
from nemo_grpo.support.files import sha256_of

FORMAT = 1
"""Format version; a new number makes every file be prepared again."""


@dataclass(frozen=True)
class Request:
    """Options of a preparation.

    Attributes:
        out: folder of the files.  revision: branch, tag or commit; None: the table's pin, or the newest.
        source: local copy of the repository, or a folder that holds such copies by data set name.
        generate: make problems here, if the data set has a generator.  force: also what is up to date.
        any_count: accept another number of problems than the paper or publisher states.
    """

    out: Path
    revision: str | None = None
    source: Path | None = None
    generate: bool = False
    force: bool = False
    any_count: bool = False

    def copy_of(self, source: Source) -> Path | None:
        """The local copy for this set."""
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
    """Refuse one folder as the copy of several repositories.

    Raises: UserError: naming the sets that would be read from it.
    """
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

    Raises: UserError: unknown name; the source cannot be reached or read (says what to download where); rows
            lack a column; the number of problems is not the stated one.
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
    """The parts of the manifest that determine the file's content and are known in advance."""
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
