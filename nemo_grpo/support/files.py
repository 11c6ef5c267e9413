"""Atomic writes, flushes, locks and hashes of files."""

import errno
import fcntl
import glob
import hashlib
import logging
import os
import shutil
import time
from pathlib import Path
from typing import IO, Any

import yaml

from nemo_grpo.support.errors import UserError, reading

log = logging.getLogger(__name__)

TABLE_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""PyYAML's safe loader: the one in C is seven times as fast, but a PyYAML built without libyaml lacks it."""

SHA256SUMS = "SHA256SUMS"
"""Name of the file with the hashes of a folder's files."""
REPLACED = "tmp_removed_"
"""Prefix of a folder that `publish_folder` will delete. It begins with ``tmp_``, like all leftovers."""
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
"""Errors of a file system without locks: Lustre without -o flock, or NFS without a lock daemon."""


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that it is either complete or as it was before, even after a kill or a full disk."""
    # Code that lists finished files by a pattern, such as *.json, does not find this name.
    temporary = path.with_name(f"tmp_{path.name}.new")
    temporary.write_text(text, encoding="utf-8")
    # The content must be on the disk before the rename is: a power cut could leave an empty file otherwise.
    flush(temporary)
    temporary.replace(path)
    # The rename is a change of the folder, which has a flush of its own.
    flush(path.parent)


def read_yaml(path: Path) -> Any:
    """Read a YAML file that comes with the package."""
    return yaml.load(path.read_text(encoding="utf-8"), Loader=TABLE_LOADER)


def existing_parent(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    # The root always exists, so the loop ends.
    while not folder.exists():
        folder = folder.absolute().parent
    return folder


def flush(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(folder: Path) -> None:
    """`flush` everything below a folder, then the folder."""
    for path in (*sorted(folder.rglob("*"), reverse=True), folder):
        flush(path)


def publish_folder(unfinished: Path, folder: Path) -> None:
    """Flush a finished folder and rename it; an existing folder of that name is replaced.

    The old folder is deleted only when the new one has its name. A kill between the two renames therefore
    leaves both folders complete, under other names.
    """
    flush_tree(unfinished)
    prefix = f"{REPLACED}{folder.name}."
    if folder.exists():
        # The time makes the name unique: on NFS an earlier replaced folder stays while a process has one of
        # its files open.
        folder.rename(folder.with_name(f"{prefix}{time.time_ns()}"))
    unfinished.rename(folder)
    flush(folder.parent)
    for replaced in folder.parent.glob(f"{glob.escape(prefix)}*"):
        shutil.rmtree(replaced, ignore_errors=True)


def hold_lock(file: IO[Any] | int, refusal: str, *, per_process: bool = False) -> None:
    """Lock an open file until it is closed, or log a warning if the file system has no locks.

    Args:
        file: Open file, or its descriptor.
        refusal: Message of the error if another process holds the lock.
        per_process: True for a lock of this process alone: children that inherit the file do not hold it,
            and this process may lock the file again.
    """
    # POSIX's lockf belongs to the process, BSD's flock to the open file, which children share.
    lock = fcntl.lockf if per_process else fcntl.flock
    try:
        lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise UserError(refusal) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        log.warning("no locks here (%s), so do not start it twice; else: %s", error.strerror, refusal)


def make_readable(folder: Path) -> None:
    """Let everybody read a folder and its files, which some libraries make readable for the owner alone."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's content in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_in(folder: Path) -> list[Path]:
    """List the files below a folder that its ``SHA256SUMS`` covers, sorted."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / SHA256SUMS)


def write_sha256(folder: Path) -> None:
    """Write the hashes of all files below a folder to ``SHA256SUMS``, in the format of ``sha256sum``."""
    lines = [f"{sha256_of(path)}  {path.relative_to(folder)}\n" for path in files_in(folder)]
    (folder / SHA256SUMS).write_text("".join(lines))


def check_sha256(folder: Path) -> int:
    """Refuse a folder whose files do not match its ``SHA256SUMS``.

    Returns:
        The number of files that were checked; 0 without a ``SHA256SUMS``.
    """
    path = folder / SHA256SUMS
    if not path.exists():
        return 0
    with reading(path, "a list of hashes", "copy or download it again"):
        lines = [line.partition("  ") for line in path.read_text().splitlines() if line]
    for expected, _, name in lines:
        if not (folder / name).is_file() or sha256_of(folder / name) != expected:
            raise UserError(f"{folder / name} does not match {path}; copy or download it again")
    return len(lines)
