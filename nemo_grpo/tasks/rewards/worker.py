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
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the parent
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    me, (job, *details) = os.getpid(), connection.recv()
    answer = JOBS[job](*details)
    connection.send_bytes(b"ready")
    while True:
        try:
            number, request, count = connection.recv()
        except (EOFError, OSError):  # the parent is gone
            os.killpg(me, signal.SIGKILL)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds * count)
        reply = answer(*request)
        if os.getpid() != me:  # the function forked and this is the copy
            os._exit(1)
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send_bytes(numbered(number, reply))


def numbered(number: int, reply: bytes) -> bytes:
    """Put the number of its request before a reply."""
    return b"%d:%b" % (number, reply)


def mathematics() -> Callable[[str, str], bytes]:
    """Make (reference, answer) -> ``1`` if math-verify finds them equal, else ``0``.

    Both are in boxes and read with the settings of NeMo-RL's math environment (HFVerifyWorker): a reference
    as LaTeX, an answer as LaTeX or as a plain expression, decimals equal to 6 places.
    """
    from math_verify import parse, verify
    from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig
    from sympy.core.random import seed

    logging.disable(logging.CRITICAL)  # what cannot be read is no news
    latex = (LatexExtractionConfig(),)
    any_notation = (ExprExtractionConfig(), LatexExtractionConfig())

    def answer(reference: str, given: str) -> bytes:
        seed(0)  # sympy tries random points
        # math-verify's own limits are alarms after seconds of the clock: verdicts would depend on the
        # machine's load. Without them its caller must set limits, as `main` does on CPU time.
        try:
            gold = parse(f"\\boxed{{{reference}}}", latex, parsing_timeout=None)
            target = parse(f"\\boxed{{{given}}}", any_notation, parsing_timeout=None)
            return b"%d" % verify(gold, target, float_rounding=6, timeout_seconds=None)
        except (Exception, RecursionError, MemoryError):
            return b"0"

    answer("x<1", "0.5")
    return answer


def own_function(path: list[str], files: dict[str, str], reference: str) -> Callable[..., bytes]:
    """Make (arguments by name, number of responses, or None for one) -> JSON, ``values`` or an ``error``."""
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
    """Make (method, its arguments) -> JSON, ``value`` or an ``error``; the methods are score and extract."""
    sys.path[:] = path
    from nemo_grpo.support import extensions

    extensions.receive_files(files)
    config = extensions.load(section["name"], "nemo_grpo.task.name").model_validate(section)
    task, declared = config.build(), set(config.reward_components)
    results = {
        "score": lambda value: components(value, declared),
        "extract": answer_text,
    }

    def answer(method: str, arguments: tuple[Any, ...]) -> bytes:
        try:
            reply: dict[str, Any] = {"value": results[method](getattr(task, method)(*arguments))}
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
        if value is None or isinstance(value, str):
            raise TypeError(f"score returns {name}={value!r}; it must be a number")
    return {name: float(value) for name, value in scores.items()}


def answer_text(answer: Any) -> str | None:
    """Check the value of an own task's ``extract``."""
    if answer is not None and not isinstance(answer, str):
        raise TypeError(f"extract returns {answer!r}; it must be a text, or None without an answer")
    return answer


def numbers(value: Any, count: int | None) -> list[float | None]:
    """Check a function's value, or its ``count`` values; None: it abstains."""
    if isinstance(value, (Mapping, Set, str)):
        raise TypeError(
            f"a {type(value).__name__} instead of {'a number' if count is None else 'a list of numbers'}"
        )
    values = [value] if count is None else list(value)
    if count is not None and len(values) != count:
        raise ValueError(f"{len(values)} values for {count} responses")
    for one in values:
        if isinstance(one, str):
            raise TypeError(f"{one!r} instead of a number")
    return [None if one is None else float(one) for one in values]


JOBS: dict[str, Callable[..., Callable[..., bytes]]] = {
    "mathematics": mathematics,
    "own_function": own_function,
    "own_task": own_task,
}

if __name__ == "__main__":
    main(Connection(int(sys.argv[1])), float(sys.argv[2]), int(sys.argv[3]))
