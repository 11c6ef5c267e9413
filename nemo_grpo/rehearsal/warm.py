"""Warm interpreters: processes that have imported a worker's modules and fork into workers.

NeMo-RL starts a dozen processes, each of which imports torch, transformers, megatron-core or vLLM for ten
seconds; a fork starts in one. Two commands, of the standard library alone:

    python warm.py serve SOCKET MODULE...                     imports the modules, then waits for requests
    python -I -S warm.py run SOCKET PYTHON ARGUMENTS...       stands for ``PYTHON ARGUMENTS...``

A fork of the server runs the command with the arguments, environment, folder and standard streams of `run`.
`run` waits, passes signals on, and exits as the fork does. Without a server it executes ``PYTHON
ARGUMENTS...``.
"""

import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any

LONGEST_MESSAGE = 1 << 20
"""Largest message, bytes; the sockets keep message boundaries, so each is read whole."""
PATIENCE = 180.0
"""Seconds for which `run` waits while a server imports."""
NOT_BEFORE_THE_FORK = "ray"
"""Package that the server does not import, because its C++ part reads a worker's environment on import."""
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def warm_command(python: str, server: str, folder: str | None) -> list[str]:
    """Return the command of an interpreter, or of a fork of the server with its socket in ``folder``."""
    if not folder:
        return [python]
    # -I and -S: `run` needs nothing but the standard library, and starts faster without site-packages.
    return [python, "-I", "-S", __file__, "run", f"{folder}/{server}", python]


def run(path: str, python: str, arguments: list[str]) -> None:
    """Run the command in a fork of the server, and exit as it does."""
    connection = _connected(path)
    if connection is None:
        os.execv(python, [python, *arguments])
    request = json.dumps([arguments, dict(os.environ), os.getcwd()]).encode()
    socket.send_fds(connection, [request], [0, 1, 2])
    pid = int(connection.recv(LONGEST_MESSAGE))

    def forward(number: int, _frame: Any) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, forward)
    # The message is empty if the server has ended, which also ends its forks.
    code = connection.recv(LONGEST_MESSAGE)
    os._exit(int(code) if code else 1)


def _connected(path: str) -> socket.socket | None:
    """Connect to a server, which may still be importing; None if it failed or takes too long."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with suppress(OSError):
            connection.connect(path)
            return connection
        if os.path.exists(f"{path}.failed"):
            return None
        time.sleep(0.1)
    return None


class NotYet:
    """Hides Ray from the server; its forks import it, and reload modules whose import of it failed."""

    def __init__(self) -> None:
        self.importers: list[str] = []

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == NOT_BEFORE_THE_FORK:
            # The first frame outside importlib is the module with the import statement.
            frame: Any = sys._getframe(1)
            while "importlib" in frame.f_code.co_filename:
                frame = frame.f_back
            self.importers.append(frame.f_globals["__name__"])
            raise ModuleNotFoundError(f"{name} is imported by forks only", name=name)

    def end(self) -> None:
        """Let Ray be imported from now on."""
        sys.meta_path.remove(self)
        for name in dict.fromkeys(self.importers):
            # A module whose own import failed without Ray is not in sys.modules, and needs no reload.
            if name in sys.modules:
                importlib.reload(sys.modules[name])


def serve(path: str, modules: list[str]) -> list[str]:
    """Import, then serve requests until the parent ends; every fork returns from here with its arguments."""
    parent = os.getppid()
    not_yet = NotYet()
    sys.meta_path.insert(0, not_yet)
    try:
        for name in modules:
            importlib.import_module(name)
    except Exception:
        open(f"{path}.failed", "w").close()
        raise
    gc.collect()
    # Forks share these pages, and their garbage collections skip the modules.
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"{path}.new")
    listener.listen(64)
    listener.settimeout(0.1)
    # Give the socket its name only now that it listens, so that no `run` is refused.
    os.rename(f"{path}.new", path)
    running: dict[int, socket.socket] = {}
    while os.getppid() == parent:
        _report_ends(running)
        _end_abandoned(running)
        with suppress(TimeoutError):
            connection, _ = listener.accept()
            arguments = _fork(connection, listener, running, not_yet)
            if arguments is not None:
                return arguments
    os._exit(0)


def _report_ends(running: dict[int, socket.socket]) -> None:
    """Send the exit codes of forks that have ended to their `run`."""
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        code = os.waitstatus_to_exitcode(status)
        # Report a fork that a signal has ended as a shell does: 128 + the signal's number.
        reported_code = code if code >= 0 else 128 - code
        # `run` may have ended as well, and then the message cannot be sent.
        with running.pop(pid) as connection, suppress(OSError):
            connection.send(b"%d" % reported_code)


def _end_abandoned(running: dict[int, socket.socket]) -> None:
    """Kill the forks whose `run` was killed, because whoever killed it meant to kill the command."""
    for pid, connection in running.items():
        try:
            is_gone = not connection.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
        except BlockingIOError:
            # Nothing to read from a `run` that waits.
            continue
        except ConnectionError:
            # `run` ended before it read everything.
            is_gone = True
        if is_gone:
            # The fork is not reaped yet, so the pid is still its own.
            os.kill(pid, signal.SIGKILL)


def _fork(
    connection: socket.socket, listener: socket.socket, running: dict[int, socket.socket], not_yet: NotYet
) -> list[str] | None:
    """Return the request's arguments in the fork, None in the server."""
    # An accepted connection waits without a limit for its request, unlike the listener.
    connection.settimeout(None)
    server = os.getpid()
    request, streams, _, _ = socket.recv_fds(connection, LONGEST_MESSAGE, 3)
    pid = os.fork()
    if pid:
        connection.send(b"%d" % pid)
        for stream in streams:
            os.close(stream)
        running[pid] = connection
        return None
    # SIGKILL, because a driver that gets SIGTERM saves and waits instead of ending.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        # The server ended before prctl, which then sends nothing.
        os._exit(1)
    # Ray kills the whole group of a worker that has died.
    os.setpgid(0, 0)
    for inherited in (listener, connection, *running.values()):
        inherited.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    arguments, environment, folder = json.loads(request)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    not_yet.end()
    return list(arguments)


def become(arguments: list[str]) -> None:
    """Act like an interpreter with these arguments: options, ``-m MODULE``, ``-c CODE`` or ``SCRIPT``."""
    # Skip options: an interpreter that already runs keeps the server's. -W is followed by an argument.
    while arguments and arguments[0] in ("-u", "-W"):
        num_words = 2 if arguments[0] == "-W" else 1
        arguments = arguments[num_words:]
    for entry in reversed(os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        if entry and entry not in sys.path:
            sys.path.insert(0, entry)
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    # Pickles look up a worker's classes in this module.
    main = sys.modules["__main__"]
    main.__dict__.update(__name__="__main__")
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(arguments[1], main.__dict__)
        return
    sys.argv = arguments
    sys.path.insert(0, os.path.dirname(arguments[0]))
    main.__dict__.update(__file__=arguments[0])
    with open(arguments[0], "rb") as file:
        exec(compile(file.read(), arguments[0], "exec"), main.__dict__)


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run(sys.argv[2], sys.argv[3], sys.argv[4:])
    become(serve(sys.argv[2], sys.argv[3:]))
