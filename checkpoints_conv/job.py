"""A conversion that can be interrupted at any moment: partial folder, journal, and a rename at the end.

Next to the output ``NAME`` lies ``.NAME.partial`` with ``data/`` (what will become NAME), ``journal.jsonl``
(one line per finished piece) and ``lock``. NAME appears only by renaming the complete, flushed ``data/``.
"""

import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from nemo_grpo.support.errors import UserError
from nemo_grpo.support.files import hold_lock, make_readable, publish_folder, write_sha256

log = logging.getLogger(__name__)
Item = TypeVar("Item")

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class _MayResume(UserError):
    """A refusal because of the output's place, not of the source. Finished pieces stay for ``--resume``."""


class Job:
    """The files of one conversion on disk: lock, journal and result. Use it as a context manager.

    Attributes:
        output: final folder.
        partial: hidden folder beside ``output``, which holds everything until the job is finished.
        data: folder within ``partial`` to which the conversion writes.
        settings: all settings that change the result.
        journal: entries of an interrupted attempt.
        num_recorded: number of finished pieces, those of an interrupted attempt included.
    """

    def __init__(
        self,
        output: Path,
        source: Path,
        settings: dict[str, Any],
        resume: bool = False,
        force: bool = False,
        also_read: Sequence[Path] = (),
    ) -> None:
        """Check that the output may be written; nothing is created yet.

        Args:
            output: folder to create.
            source: folder that is converted; it must not change between attempts.
            settings: all settings that change the result; a resumed job must have the same ones.
            resume: go on with an interrupted attempt.
            force: replace an existing output, or start an interrupted attempt anew.
            also_read: further folders that the output must not replace.
        """
        self.output = output.absolute()
        if not self.output.name:
            raise UserError(f"--output {output} is no folder that can be made; choose another")
        self.partial = self.output.with_name(f".{self.output.name}.partial")
        self.data = self.partial / "data"
        self.resume = resume
        self.force = force
        self.settings = settings | {"source": fingerprint(source)}
        self.journal: list[dict[str, Any]] = []
        self.num_recorded = 0
        self._append = threading.Lock()
        with self._can_be_made():
            self._check(source, also_read)

    @contextlib.contextmanager
    def _can_be_made(self) -> Iterator[None]:
        """Turn an error of the file system within the block into one that names the output."""
        try:
            yield
        except OSError as error:
            raise UserError(
                f"--output {self.output} cannot be made ({error.strerror}); choose another folder"
            ) from error

    def _check(self, source: Path, also_read: Sequence[Path]) -> None:
        """Refuse an output that would replace something else, and an unfinished one without an option."""
        # Links are resolved first: another name can lead to the same folder.
        output_folder = self.output.resolve()
        for folder in also_read:
            if _contains(output_folder, folder.resolve()):
                raise UserError(
                    f"--output {self.output}: {folder}, which is read, would be deleted; choose another"
                )
        source_folder = source.resolve()
        if _contains(output_folder, source_folder) or _contains(source_folder, output_folder):
            raise UserError(f"--output {self.output} overlaps the source {source}; choose another folder")
        self._check_output()
        if self.partial.exists() and not (self.resume or self.force):
            raise UserError(
                f"{self.output} has an unfinished conversion; finish it with --resume or start over "
                "with --force"
            )
        if self.resume and not self.partial.exists():
            log.info("nothing to resume for %s; starting from the beginning", self.output)

    def _check_output(self) -> None:
        """Refuse an output that exists, unless ``--force`` may replace it."""
        if self.output.is_symlink():
            raise UserError(f"--output {self.output} is a link to {self.output.resolve()}; give that folder")
        if self.output.exists() and not self.force:
            raise UserError(f"--output {self.output} exists; choose another name, or replace it with --force")
        if self.output.exists() and not _may_be_replaced(self.output):
            raise UserError(
                f"--output {self.output} holds other things than a model or a checkpoint, and --force would "
                "delete them; choose another name"
            )

    def __enter__(self) -> Self:
        """Create or reopen the partial folder and lock it."""
        with self._can_be_made():
            self.partial.mkdir(parents=True, exist_ok=True)
            self._lock = (self.partial / "lock").open("w")
        try:
            hold_lock(self._lock, f"another process is converting to {self.output}; wait until it is done")
            if not self.resume:
                shutil.rmtree(self.data, ignore_errors=True)
                (self.partial / "journal.jsonl").unlink(missing_ok=True)
            self.data.mkdir(exist_ok=True)
            self._load_journal()
        except BaseException:
            self._lock.close()
            raise
        return self

    def _load_journal(self) -> None:
        """Read the finished pieces of an interrupted attempt, and open the journal to add to it."""
        path = self.partial / "journal.jsonl"
        lines = path.read_bytes().split(b"\n") if path.exists() else []
        for line in lines:
            # The last line may be torn: its process was killed while it wrote.
            with contextlib.suppress(ValueError, RecursionError):
                entry = json.loads(line)
                if isinstance(entry, dict):
                    self.journal.append(entry)
        if self.journal:
            self._check_settings(self.journal.pop(0))
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.num_recorded = len(self.journal)
        is_empty = lines in ([], [b""])
        if is_empty:
            self._write_line(self.settings)
        elif lines[-1]:
            # End the torn line, so that the next one can be read.
            os.write(self._file, b"\n")

    def _check_settings(self, first_settings: dict[str, Any]) -> None:
        """Refuse to go on with other settings than the first attempt's, which the journal begins with."""
        # The journal went through JSON, which turns tuples into lists, so these settings must, too.
        settings = json.loads(json.dumps(self.settings))
        if settings != first_settings:
            changed = sorted(key for key in settings if self.settings[key] != first_settings.get(key))
            raise UserError(
                f"--resume {self.output}: {', '.join(changed)} changed since the first attempt; "
                "use the same options and source, or start over with --force"
            )

    def record(self, entry: dict[str, Any]) -> None:
        """Note that a piece is done."""
        with self._append:
            # One write per line, so a killed process tears at most the last one.
            self._write_line(entry)
            self.num_recorded += 1

    def _write_line(self, entry: dict[str, Any]) -> None:
        os.write(self._file, json.dumps(entry).encode() + b"\n")

    def num_allocated(self) -> int:
        """Count the bytes that an interrupted attempt's files, which have holes, take on the disk."""
        files = (path for path in self.data.rglob("*") if path.is_file())
        # POSIX counts blocks of 512 bytes, whatever the file system's block size is.
        return sum(path.stat().st_blocks * 512 for path in files)

    def need_space(self, num_bytes: int, *, reuses: bool = False) -> None:
        """Refuse to start a conversion that does not fit on the disk.

        Args:
            num_bytes: size of the result.
            reuses: True: the result overwrites the files of an interrupted attempt, whose space then counts.
        """
        free = shutil.disk_usage(self.partial).free
        num_reused = self.num_allocated() if reuses else 0
        if free < num_bytes - num_reused:
            raise _MayResume(
                f"{self.output.parent} has {free / 1e9:.1f} GB free, {num_bytes / 1e9:.1f} GB are needed; "
                "free some or choose another folder"
            )

    def finish(self, sha256: bool = False) -> None:
        """Flush everything to disk and give the output its name.

        Args: sha256: also write ``SHA256SUMS``.
        """
        if sha256:
            write_sha256(self.data)
        make_readable(self.data)
        try:
            self._check_output()
        except UserError as error:
            raise _MayResume(str(error)) from None
        publish_folder(self.data, self.output)
        os.close(self._file)
        shutil.rmtree(self.partial)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the lock. A failed job keeps its partial folder for ``--resume`` if any piece is finished.

        After a refused source the partial folder is removed, since the source would be refused again.
        """
        self._lock.close()
        is_refused = isinstance(error, UserError) and not isinstance(error, _MayResume)
        if error is not None:
            if is_refused or not self.num_recorded:
                shutil.rmtree(self.partial, ignore_errors=True)
            else:
                log.warning(
                    "%s is not finished; go on with --resume if source and options stay as they are, else "
                    "start over with --force",
                    self.output,
                )
        if isinstance(error, OSError) and error.errno in _DISK_FULL:
            raise UserError(
                f"the disk of {self.output.parent} is full; free some space and run again with --resume"
            ) from error


def run_parallel(items: Iterable[Item], work: Callable[[Item], None], num_workers: int) -> None:
    """Do ``work`` on every item, on several threads. The first failure or Ctrl-C stops all of them.

    Reading, writing and checksums release Python's lock, so threads overlap the disk with the processor.
    """
    iterator = iter(items)
    lock = threading.Lock()
    stop = threading.Event()

    def worker() -> None:
        while not stop.is_set():
            # Only one thread at a time may ask an iterator.
            with lock:
                item = next(iterator, None)
            if item is None:
                return
            try:
                work(item)
            except BaseException:
                stop.set()
                raise

    with ThreadPoolExecutor(num_workers, thread_name_prefix="convert") as pool:
        futures = [pool.submit(worker) for _ in range(num_workers)]
        try:
            for future in futures:
                future.result()
        except BaseException:
            # Ctrl-C arrives here, in the main thread, which waits.
            stop.set()
            raise


FLUSH_SECONDS = 0.2
"""Pause between two flushes of `flush_behind`."""


@contextlib.contextmanager
def flush_behind(descriptors: Sequence[int]) -> Iterator[None]:
    """Flush these files to disk in the background, so that the final flush is short."""
    stop = threading.Event()

    def flush() -> None:
        while not stop.wait(FLUSH_SECONDS):
            for descriptor in descriptors:
                os.fdatasync(descriptor)

    with ThreadPoolExecutor(1, thread_name_prefix="flush") as pool:
        future = pool.submit(flush)
        try:
            yield
        finally:
            stop.set()
        # The system reports a failed flush only once, so the flush at the end would not see it.
        future.result()


def fingerprint(source: Path) -> dict[str, Any]:
    """Identify a folder's present content by its path, and its files' names, sizes and times."""
    files: Iterator[Path] = (path for path in sorted(source.rglob("*")) if path.is_file())
    digest = hashlib.sha256()
    for path in files:
        status = path.stat()
        digest.update(f"{path.relative_to(source)} {status.st_size} {status.st_mtime_ns}\n".encode())
    return {"folder": str(source.resolve()), "files": digest.hexdigest()}


_RESULT_FILES = (
    "config.json",
    "adapter_config.json",
    "*.safetensors",
    ".metadata",
    "iter_*",
    "latest_checkpointed_iteration.txt",
)
"""Files of models and checkpoints; --force replaces only a folder that has one of them."""


def _contains(folder: Path, path: Path) -> bool:
    """Return True if a path is the folder itself or lies in it."""
    return folder == path or folder in path.parents


def _may_be_replaced(output: Path) -> bool:
    is_empty = output.is_dir() and not any(output.iterdir())
    is_result = any(any(output.glob(pattern)) for pattern in _RESULT_FILES)
    return is_empty or is_result
