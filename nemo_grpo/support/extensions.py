"""A user's own classes and functions, which a recipe names as ``my_file.py:Name`` or ``package.module:Name``.

A file's path is relative to the working directory, as the paths of a recipe's data files are. The text of the
file is sent to the other processes (`texts_of`, `receive_files`), so the machines of a cluster need no copy
of it. Packages that the file imports must be installed there.
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
"""Texts of the files that this process has loaded or received, by the path in the recipe."""
_BROKEN: dict[str, str] = {}
"""Error messages of the files whose import failed, by module name. Their import is not tried again."""
TRIAL_SECONDS = 60
"""Seconds that a trial import of a user's file or module may take."""
_TRIAL_PASSED = 77
"""Exit code of the child process of a trial import if the import returned or raised an error."""
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
"""True within a block of `trial_imports`."""


def is_reference(name: object) -> bool:
    """True for ``my_file.py:Name`` and ``package.module:Name``; built-in names have no colon."""
    return isinstance(name, str) and ":" in name


@contextmanager
def trial_imports() -> Iterator[None]:
    """Within the block, import a user's file or module in a child process first.

    An import that ends Python or hangs then ends only the child. Only `nemo-grpo recipe check` needs that,
    because it goes on with further recipes. Every other command imports in its own process: if a file hangs,
    the user interrupts the command, and the traceback names the line.
    """
    global _trials_are_on
    _trials_are_on = True
    try:
        yield
    finally:
        _trials_are_on = False


def load(reference: str, key: str) -> Any:
    """Load the class or function that a recipe names.

    Args:
        reference: ``my_file.py:Name`` or ``package.module:Name``.
        key: Key of the recipe that has this value, for messages.
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
    """Return the texts of the files that these references name, by path, for `receive_files` elsewhere."""
    files = [str(name).rpartition(":")[0] for name in references if is_reference(name)]
    return {file: _FILES[file] for file in files if file in _FILES}


def receive_files(files: Mapping[str, str]) -> None:
    """Keep the texts of another process's files, which this machine may not have."""
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
    # The file on this machine comes before a text that another process sent.
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
    # The name has a hash of the content, so a changed file becomes another module. Objects of the first
    # module keep the code that they were made with.
    digest = hashlib.sha256(f"{file}\n{text}".encode()).hexdigest()[:12]
    name = f"nemo_grpo_own_{Path(file).stem}_{digest}"
    if name not in sys.modules:
        _run(text, file, name, key, reference)
    return sys.modules[name]


def _run(text: str, file: str, name: str, key: str, reference: str) -> None:
    """Run a file's text as a module, and add the module to `sys.modules`.

    Args:
        text: Text of the file.
        file: Path of the file, as the recipe names it.
        name: Name of the module.
        key: Key of the recipe, for messages.
        reference: Value of the key, for messages and for a trial import.
    """
    if name not in _BROKEN:
        failure = _failed_trial(reference)
        if failure is not None:
            # A failure is kept: the settings of a sweep share a file, and each trial may take a minute.
            _BROKEN[name] = failure
    if name in _BROKEN:
        raise UserError(f"{key}={reference}: {_BROKEN[name]}")

    module = ModuleType(name)
    module.__file__ = file
    # The module is registered before it runs: dataclasses and pydantic look up the module of each class
    # while they build it.
    sys.modules[name] = module
    # Tracebacks and `inspect.getsource` read the source from here where this machine does not have the file.
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    try:
        exec(compile(text, file, "exec"), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        _BROKEN[name] = place_of(error, file) + _remedy_for_neighbour(error, file)
        raise UserError(f"{key}={reference}: {_BROKEN[name]}") from None


def _failed_trial(reference: str) -> str | None:
    """Try an import in a child process, and explain why it neither returned nor raised an error.

    Returns: None outside of `trial_imports`, and None if the import returned or raised an error. This process
        then imports it, too, and reports the same error with its line.
    """
    if not _trials_are_on:
        return None
    remedy = "keep work out of the top level of the file, in functions"
    try:
        child = subprocess.run(
            [sys.executable, "-c", _TRIAL, reference],
            timeout=TRIAL_SECONDS,
            stdin=subprocess.DEVNULL,
            # Pipes would hang: a process that the file starts holds them open beyond the child's end.
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return f"its import takes more than {TRIAL_SECONDS} s; {remedy}"
    if child.returncode == _TRIAL_PASSED:
        return None
    return f"its import ends Python ({how_ended(child.returncode)}); {remedy}"


def _remedy_for_neighbour(error: BaseException, file: str) -> str:
    """Return a remedy if the error is the failed import of another file in the same folder; else ""."""
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
    """Describe an error as ``Error: message (file:line)``.

    The line is the innermost line of ``file`` in the traceback. It is left out if no line is of this file.
    """
    description = f"{type(error).__name__}: {' '.join(_message(error).split())}"
    line = _line_in(error, file)
    return f"{description} ({file}:{line})" if line else description


def _message(error: BaseException) -> str:
    """Return the message of an error, without web addresses and line numbers."""
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
    """Find the innermost line of a file in an error's traceback."""
    if isinstance(error, SyntaxError):
        return error.lineno
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return lines[-1] if lines else None
