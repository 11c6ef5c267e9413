"""A user's own classes and functions, which a recipe names as ``my_file.py:Name`` or ``package.module:Name``.

A file is relative to the working directory, as a recipe's data files are. Its text travels to other processes
(`texts_of`, `receive_files`), so the machines of a cluster need no copy; what it imports must be installed.
"""

import hashlib
import importlib
import importlib.util
import inspect
import linecache
import subprocess
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import PydanticUserError, ValidationError

from nemo_grpo.support.errors import UserError, did_you_mean, how_ended

_FILES: dict[str, str] = {}
"""File, as the recipe names it -> its text: all that this process loaded or received."""
_BROKEN: dict[str, str] = {}
"""Module of a file -> the error of its import, which is not tried again."""
TRIAL_SECONDS = 60
"""Longest import of a user's file or module that `trial_imports` waits for."""
_TRIAL_PASSED = 77
"""Exit code of a child process that `trial_imports` started, once the import has returned or raised."""
_TRIAL = f"""
import sys
from nemo_grpo.support import extensions
from nemo_grpo.support.errors import UserError
try:
    extensions.load(sys.argv[1], "trial import")
except UserError:
    pass
sys.exit({_TRIAL_PASSED})
"""
_trials_are_on = False
"""True within `trial_imports`."""


def is_reference(name: object) -> bool:
    """True for ``my_file.py:Name`` and ``package.module:Name``; built-in names have no colon."""
    return isinstance(name, str) and ":" in name


@contextmanager
def trial_imports() -> Iterator[None]:
    """Import each user's file or module in a child process first, so that it cannot end or hang this one.

    Only `nemo-grpo recipe check` does so, because it goes on with further recipes. Every other command
    imports at once: a file that hangs there is interrupted, and the traceback names its line.
    """
    global _trials_are_on
    _trials_are_on = True
    try:
        yield
    finally:
        _trials_are_on = False


def load(reference: str, key: str) -> Any:
    """Load the object that a recipe's ``key`` names.

    Args:
        reference: ``my_file.py:Name`` or ``package.module:Name``.
        key: Key of the recipe, for messages.
    """
    place, _, name = reference.rpartition(":")
    if place.endswith(".py"):
        module = _file_module(place, key, reference)
    else:
        module = _installed_module(place, key, reference)
    if not hasattr(module, name):
        defined_there = [
            attribute
            for attribute, value in vars(module).items()
            if getattr(value, "__module__", None) == module.__name__
        ]
        raise UserError(f"{key}: {place} has no {name!r}{did_you_mean(name, defined_there)}")
    return getattr(module, name)


def load_class(reference: str, base: type[Any], key: str) -> Any:
    """Load a class that derives from ``base``; see `load`."""
    loaded = load(reference, key)
    if not (inspect.isclass(loaded) and issubclass(loaded, base)):
        raise UserError(
            f"{key}={reference}: it must be a class that derives from {base.__name__} ({base.__module__})"
        )
    return loaded


def texts_of(references: Iterable[object]) -> dict[str, str]:
    """Return file -> text of references that name files, for `receive_files` in another process."""
    files = [str(name).rpartition(":")[0] for name in references if is_reference(name)]
    return {file: _FILES[file] for file in files if file in _FILES}


def receive_files(files: Mapping[str, str]) -> None:
    """Use these texts for these files, whether or not this machine has them."""
    _FILES.update(files)


def _installed_module(name: str, key: str, reference: str) -> ModuleType:
    """Import a module that is installed."""
    if not all(part.isidentifier() for part in name.split(".")):
        raise UserError(
            f"{key}={reference}: {name!r} is no module; write my_file.py:Name or package.module:Name"
        )
    failure = None if name in sys.modules else _failed_trial(reference)
    if failure is not None:
        raise UserError(f"{key}={reference}: {failure}")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"{key}={reference}: {error}; install it, or name a file, as my_file.py:Name"
        ) from None
    except (Exception, SystemExit) as error:
        package_file = getattr(importlib.util.find_spec(name.partition(".")[0]), "origin", None)
        raise UserError(f"{key}={reference}: when it is imported: {place_of(error, package_file)}") from None


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
    # A name by content: a changed file is another module, and objects of the old one stay what they were.
    digest = hashlib.sha256(f"{file}\n{text}".encode()).hexdigest()[:12]
    name = f"nemo_grpo_own_{Path(file).stem}_{digest}"
    if name not in sys.modules:
        _run(text, file, name, key, reference)
    return sys.modules[name]


def _run(text: str, file: str, name: str, key: str, reference: str) -> None:
    """Run a file's text as the module of this name."""
    if name not in _BROKEN:
        failure = _failed_trial(reference)
        if failure is not None:
            # The settings of a sweep share a file, and each trial may take a minute.
            _BROKEN[name] = failure
    if name in _BROKEN:
        raise UserError(f"{key}={reference}: {_BROKEN[name]}")
    module = ModuleType(name)
    module.__file__ = file
    # Before it runs, because dataclasses and pydantic look their class's module up there.
    sys.modules[name] = module
    # For tracebacks and `inspect.getsource`, where this machine has only the text.
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    try:
        exec(compile(text, file, "exec"), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        _BROKEN[name] = place_of(error, file) + _remedy_for_neighbour(error, file)
        raise UserError(f"{key}={reference}: {_BROKEN[name]}") from None


def _failed_trial(reference: str) -> str | None:
    """Import in a child process, and say why the import did not come back.

    Returns: None outside of `trial_imports`, and if the import returned or raised an error: this process then
        gets the same error, and reports it with its line.
    """
    if not _trials_are_on:
        return None
    remedy = "keep work out of the top level of the file, in functions"
    try:
        child = subprocess.run(
            [sys.executable, "-c", _TRIAL, reference],
            timeout=TRIAL_SECONDS,
            stdin=subprocess.DEVNULL,
            # No pipes: a process that the file starts would hold them open beyond the child's end.
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return f"its import takes more than {TRIAL_SECONDS} s; {remedy}"
    if child.returncode == _TRIAL_PASSED:
        return None
    return f"its import ends Python ({how_ended(child.returncode)}); {remedy}"


def _remedy_for_neighbour(error: BaseException, file: str) -> str:
    """Return the remedy if a file failed to import another one beside it; else an empty text."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    package = error.name.partition(".")[0]
    folder = Path(file).parent
    if not (folder / f"{package}.py").is_file() and not (folder / package).is_dir():
        return ""
    return (
        f"; {file} travels to other processes and machines alone, without {package} beside it: put both into "
        "one file, or install a package that has both"
    )


def place_of(error: BaseException, file: str | None) -> str:
    """Describe an error: ``Error: message (file:line)``, the last line of ``file`` that it passed through."""
    description = f"{type(error).__name__}: {' '.join(_message(error).split())}"
    line = _line_in(error, file)
    return f"{description} ({file}:{line})" if line else description


def _message(error: BaseException) -> str:
    """Return an error's own words, without addresses and line numbers."""
    if isinstance(error, ValidationError):
        details = error.errors(include_url=False)
        return "; ".join(f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in details)
    if isinstance(error, SyntaxError):
        return str(error.msg)
    if isinstance(error, PydanticUserError):
        # The first sentence is about the user's class; the others are about pydantic.
        return str(error).partition("\n")[0].partition(". ")[0]
    return str(error)


def _line_in(error: BaseException, file: str | None) -> int | None:
    """Find the last line of a file that an error passed through."""
    if isinstance(error, SyntaxError):
        return error.lineno
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return lines[-1] if lines else None
