"""A user's own classes and functions, which a recipe names as ``my_file.py:Name`` or ``package.module:Name``.

A file is relative to the working directory, as a recipe's data files are. Its text travels to other processes
(`texts_of`, `receive_files`), so the machines of a cluster need no copy; what it imports must be installed.
"""

import hashlib
import importlib
import importlib.util
import inspect
import linecache
import sys
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import PydanticUserError, ValidationError

from nemo_grpo.support.errors import UserError, did_you_mean

_FILES: dict[str, str] = {}
"""File, as the recipe names it -> its text: all that this process loaded or received."""
_BROKEN: dict[str, str] = {}
"""Module of a file -> the error of its import, which is not tried again."""


def is_reference(name: object) -> bool:
    """True for ``my_file.py:Name`` and ``package.module:Name``; built-in names have no colon."""
    return isinstance(name, str) and ":" in name


def load(reference: str, key: str) -> Any:
    """Load the object that a recipe's ``key`` names.

    Args:    reference: ``my_file.py:Name`` or ``package.module:Name``.  key: for messages.
    """
    where, _, name = reference.rpartition(":")
    module = _file_module(where, key, reference) if where.endswith(".py") else _module(where, key, reference)
    if not hasattr(module, name):
        own = [n for n, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__]
        raise UserError(f"{key}: {where} has no {name!r}{did_you_mean(name, own)}")
    return getattr(module, name)


def load_class(reference: str, base: type[Any], key: str) -> Any:
    """Load a class that derives from ``base``; see `load`."""
    found = load(reference, key)
    if not (inspect.isclass(found) and issubclass(found, base)):
        raise UserError(
            f"{key}={reference}: it must be a class that derives from {base.__name__} ({base.__module__})"
        )
    return found


def texts_of(references: Iterable[object]) -> dict[str, str]:
    """Return file -> text of references that name files, for `receive_files` in another process."""
    files = [str(name).rpartition(":")[0] for name in references if is_reference(name)]
    return {file: _FILES[file] for file in files if file in _FILES}


def receive_files(files: Mapping[str, str]) -> None:
    """Use these texts for these files, whether or not this machine has them."""
    _FILES.update(files)


def _module(name: str, key: str, reference: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise UserError(
            f"{key}={reference}: {name!r} is no module; write my_file.py:Name or package.module:Name"
        )
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"{key}={reference}: {error}; install it, or name a file, as my_file.py:Name"
        ) from None
    except (Exception, SystemExit) as error:
        file = getattr(importlib.util.find_spec(name.partition(".")[0]), "origin", None)
        raise UserError(f"{key}={reference}: when it is imported: {place_of(error, file)}") from None


def _file_module(file: str, key: str, reference: str) -> ModuleType:
    """Load a file as a module whose name has a hash of its text."""
    try:
        text = Path(file).read_text(encoding="utf-8") if Path(file).is_file() else _FILES.get(file)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{key}={reference}: {file} cannot be read ({error})") from None
    if text is None:
        raise UserError(
            f"{key}={reference}: there is no file {Path(file).absolute()}; a path is relative to the working "
            "directory"
        )
    _FILES[file] = text
    digest = hashlib.sha256(f"{file}\n{text}".encode()).hexdigest()[:12]
    name = f"nemo_grpo_own_{Path(file).stem}_{digest}"
    if name not in sys.modules:
        _run(text, file, name, f"{key}={reference}")
    return sys.modules[name]


def _run(text: str, file: str, name: str, what: str) -> None:
    if name in _BROKEN:
        raise UserError(f"{what}: {_BROKEN[name]}")
    module = ModuleType(name)
    module.__file__ = file
    sys.modules[name] = module  # before it runs: dataclasses and pydantic look their module up
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    try:
        exec(compile(text, file, "exec"), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        _BROKEN[name] = place_of(error, file) + _remedy_for_neighbour(error, file)
        raise UserError(f"{what}: {_BROKEN[name]}") from None


def _remedy_for_neighbour(error: BaseException, file: str) -> str:
    """Return the remedy if a file failed to import another one beside it; else an empty text."""
    imported = error.name if isinstance(error, ModuleNotFoundError) else None
    top = (imported or "").partition(".")[0]
    folder = Path(file).parent
    if not top or not ((folder / f"{top}.py").is_file() or (folder / top).is_dir()):
        return ""
    return (
        f"; {file} travels to other processes and machines alone, without {top} beside it: put both into one "
        "file, or install a package that has both"
    )


def place_of(error: BaseException, file: str | None) -> str:
    """Describe an error: ``Error: message (file:line)``, the last line of ``file`` that it passed through."""
    if isinstance(error, ValidationError):
        parts = [(".".join(map(str, each["loc"])), each["msg"]) for each in error.errors(include_url=False)]
        said = "; ".join(map(": ".join, parts))
    else:
        said = str(error.msg if isinstance(error, SyntaxError) else error)
    if isinstance(error, PydanticUserError):  # its first sentence; the rest is about pydantic
        said = said.partition("\n")[0].partition(". ")[0]
    said = " ".join(said.split())
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    text = f"{type(error).__name__}: {said}"
    return f"{text} ({file}:{line})" if line else text
