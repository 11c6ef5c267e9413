"""Script of a `worker_pool`'s processes, which answer its requests.

A process receives its job, a name of `JOBS` with arguments, says that it is ready, and answers requests with
bytes. It leads a process group, which ends with it. The kernel kills the process if a request takes too
much CPU time, even if the parent is gone; memory is limited likewise. Only `own_function` and `own_task`
import this package, which brings in torch.
"""

import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping, Set
from multiprocessing.connection import Connection
from typing import Any


def main(connection: Connection, cpu_seconds: float, memory_bytes: int) -> None:
    """Answer requests until the parent has ended.

    Args:
        connection: connection to the parent.
        cpu_seconds: limit on the CPU time of each response.
        memory_bytes: limit on the process's address space.
    """
    # SIGPROF, the timer's signal, must end this process. It would not if the parent ignores it, because
    # processes inherit ignored signals.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    # Ctrl-C in a terminal is for the parent, which ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A worker that is killed must not write gigabytes of a core file.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    own_pid = os.getpid()
    job, *details = connection.recv()
    answer = JOBS[job](*details)
    connection.send_bytes(b"ready")
    while True:
        try:
            number, request, num_responses = connection.recv()
        except (EOFError, OSError):
            # The parent is gone. The group ends with this process, and with it all that a function started.
            os.killpg(own_pid, signal.SIGKILL)
        # This timer belongs to the kernel, so it also ends a computation in C, even without the parent.
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds * num_responses)
        reply = answer(*request)
        # A function that forks returns twice; only the worker itself may reply.
        if os.getpid() != own_pid:
            os._exit(1)
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send_bytes(numbered(number, reply))


def numbered(number: int, reply: bytes) -> bytes:
    """Put the number of its request before a reply."""
    return b"%d:%b" % (number, reply)


def mathematics() -> Callable[[str, str], bytes]:
    """Make the function (reference, answer) -> ``1`` if math-verify finds them equal, else ``0``.

    Both are in boxes and read with the settings of NeMo-RL's math environment (HFVerifyWorker): a reference
    as LaTeX, an answer as LaTeX or as a plain expression, decimals equal to 6 places.
    """
    from math_verify import parse, verify
    from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig
    from sympy.core.random import seed

    # math-verify logs every answer that it cannot read: policies write many of them.
    logging.disable(logging.CRITICAL)
    latex = (LatexExtractionConfig(),)
    any_notation = (ExprExtractionConfig(), LatexExtractionConfig())

    def compare(reference: str, answer: str) -> bytes:
        seed(0)  # sympy compares at random points
        # math-verify's own limits are alarms after seconds of the clock: verdicts would depend on the
        # machine's load. Without them its caller must set limits, as `main` does on CPU time.
        try:
            gold = parse(f"\\boxed{{{reference}}}", latex, parsing_timeout=None)
            target = parse(f"\\boxed{{{answer}}}", any_notation, parsing_timeout=None)
            return b"%d" % verify(gold, target, float_rounding=6, timeout_seconds=None)
        except (Exception, RecursionError, MemoryError):
            return b"0"

    # Compare once in advance: the first comparison imports and builds much, which would use up the CPU time
    # of a request.
    compare("x<1", "0.5")
    return compare


def own_function(path: list[str], files: dict[str, str], reference: str) -> Callable[..., bytes]:
    """Make the function (arguments by name, count) -> JSON with ``values`` or an ``error``.

    Its ``count`` is the number of responses of a list, or None for one response.

    Args:
        path: the parent's ``sys.path``.
        files: texts of the user's files as the parent has read them.
        reference: the function's name in the recipe.
    """
    # Before the import: the package may be found by the parent's path alone.
    sys.path[:] = path
    from nemo_grpo.support import extensions

    extensions.receive_files(files)
    function = extensions.load(reference, "nemo_grpo.rewards")

    def answer(arguments: dict[str, Any], count: int | None) -> bytes:
        try:
            reply: dict[str, Any] = {"values": numbers(function(**arguments), count)}
        except (Exception, RecursionError, MemoryError) as error:
            reply = {"error": extensions.place_of(error, reference.rpartition(":")[0])}
        return json.dumps(reply).encode()

    return answer


def own_task(path: list[str], files: dict[str, str], section: dict[str, Any]) -> Callable[..., bytes]:
    """Make the function (method, its arguments) -> JSON with ``value`` or an ``error``.

    The methods are score and extract.

    Args:
        path: the parent's ``sys.path``.
        files: texts of the user's files as the parent has read them.
        section: the recipe's ``nemo_grpo.task``.
    """
    sys.path[:] = path
    from nemo_grpo.support import extensions

    extensions.receive_files(files)
    config = extensions.load(section["name"], "nemo_grpo.task.name").model_validate(section)
    task = config.build()
    declared = set(config.reward_components)

    def call(method: str, arguments: tuple[Any, ...]) -> Any:
        value = getattr(task, method)(*arguments)
        return components(value, declared) if method == "score" else answer_text(value)

    def answer(method: str, arguments: tuple[Any, ...]) -> bytes:
        try:
            reply: dict[str, Any] = {"value": call(method, arguments)}
        except (Exception, RecursionError, MemoryError) as error:
            reply = {"error": extensions.place_of(error, section["name"].rpartition(":")[0])}
        return json.dumps(reply).encode()

    return answer


def components(scores: Any, declared: Set[str]) -> dict[str, float]:
    """Check the value of an own task's ``score``: a number for each declared component, and no other."""
    if not isinstance(scores, Mapping):
        raise TypeError(f"score returns a {type(scores).__name__} instead of a dict of components")
    for name in sorted(declared - scores.keys()):
        raise ValueError(f"score returns no {name!r}; every response has a number for {sorted(declared)}")
    for name in sorted(scores.keys() - declared):
        raise ValueError(
            f"score returns {name!r}, which reward_components does not declare; add it there or leave it out"
        )
    for name, value in scores.items():
        # float() would read a text such as "1".
        if value is None or isinstance(value, str):
            raise TypeError(f"score returns {name}={value!r}; it must be a number")
    return {name: float(value) for name, value in scores.items()}


def answer_text(answer: Any) -> str | None:
    """Check the value of an own task's ``extract``."""
    if answer is not None and not isinstance(answer, str):
        raise TypeError(f"extract returns {answer!r}; it must be a text, or None without an answer")
    return answer


def numbers(value: Any, count: int | None) -> list[float | None]:
    """Check a function's value.

    Args:
        value: that the function returned.
        count: number of responses that it was called for; None: one, and the value is no list.

    Returns:
        A number per response, or None where the function abstains.
    """
    # A dict or set has no order of the responses; a text is a list of characters.
    if isinstance(value, (Mapping, Set, str)):
        expected = "a number" if count is None else "a list of numbers"
        raise TypeError(f"a {type(value).__name__} instead of {expected}")
    values = [value] if count is None else list(value)
    if count is not None and len(values) != count:
        raise ValueError(f"{len(values)} values for {count} responses")
    for number in values:
        if isinstance(number, str):
            raise TypeError(f"{number!r} instead of a number")
    return [None if number is None else float(number) for number in values]


JOBS: dict[str, Callable[..., Callable[..., bytes]]] = {
    "mathematics": mathematics,
    "own_function": own_function,
    "own_task": own_task,
}

if __name__ == "__main__":
    main(Connection(int(sys.argv[1])), float(sys.argv[2]), int(sys.argv[3]))
