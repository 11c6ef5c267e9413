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
REPLACED = "tmp_removed_"
"""Prefix of a folder that `publish_folder` replaces; checkpoints' leftovers begin with ``tmp_``, too."""
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
"""Lustre without -o flock, NFS without a lock daemon."""


def write_atomically(path: Path, text: str) -> None:
    """Write a file; a kill or a full disk leaves it as it was, or complete."""
    # No pattern for finished files matches this name.
    temporary = path.with_name(f"tmp_{path.name}.new")
    temporary.write_text(text, encoding="utf-8")
    # The content before the name: after a power cut the new name must not lead to an empty file.
    flush(temporary)
    temporary.replace(path)
    # A rename is an entry of the folder, which is flushed apart from the file.
    flush(path.parent)


def read_yaml(path: Path) -> Any:
    """Read a YAML file that comes with the package."""
    return yaml.load(path.read_text(encoding="utf-8"), Loader=TABLE_LOADER)


def existing_parent(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


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
    """Flush a finished folder and give it its name; an existing folder of that name is replaced.

    A kill between the two renames leaves both, complete, under other names: the old one is deleted when the
    new one has its name.
    """
    flush_tree(unfinished)
    prefix = f"{REPLACED}{folder.name}."
    if folder.exists():
        # A new name each time: NFS may keep an earlier replaced folder while a process has a file of it open.
        folder.rename(folder.with_name(f"{prefix}{time.time_ns()}"))
    unfinished.rename(folder)
    flush(folder.parent)
    for replaced in folder.parent.glob(f"{glob.escape(prefix)}*"):
        shutil.rmtree(replaced, ignore_errors=True)


def hold_lock(file: IO[Any] | int, refusal: str, *, per_process: bool = False) -> None:
    """Lock an open file until it is closed; warn where the disk has no locks.

    Args:
        file: Open file, or its descriptor.
        refusal: Message if another process holds the lock.
        per_process: Children that inherit the file do not hold it, and this process may lock it again.
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
    """Set mode 0644 on files and 0755 on folders, which some libraries make for their owner alone."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def sha256_of(path: Path) -> str:
    """Return the hexadecimal digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_in(folder: Path) -> list[Path]:
    """List the files below a folder that its ``SHA256SUMS`` covers, sorted."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / SHA256SUMS)


def write_sha256(folder: Path) -> None:
    """Write ``SHA256SUMS`` over all files below a folder, in the form of the sha256sum command."""
    lines = [f"{sha256_of(path)}  {path.relative_to(folder)}\n" for path in files_in(folder)]
    (folder / SHA256SUMS).write_text("".join(lines))


def check_sha256(folder: Path) -> int:
    """Compare a folder with its ``SHA256SUMS``. Returns: number of files checked; 0 if there is no list."""
    path = folder / SHA256SUMS
    if not path.exists():
        return 0
    with reading(path, "a list of hashes", "copy or download it again"):
        lines = [line.partition("  ") for line in path.read_text().splitlines() if line]
    for expected, _, name in lines:
        if not (folder / name).is_file() or sha256_of(folder / name) != expected:
            raise UserError(f"{folder / name} does not match {path}; copy or download it again")
    return len(lines)
