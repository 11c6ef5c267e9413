"""The retriever service under load: queries per second, latency, and that every answer is the right one.

Starts ``nemo-grpo retriever serve`` on a corpus made on the spot, and asks it from several client processes
at once. A query is a few words of one passage, among them one that no other passage has, so the right answer
is known. One more client sends nothing but bad requests all the while.

    python benchmarks/retriever_load.py [--passages 100000] [--clients 16] [--requests 100] [--batch 1 16]
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil

from nemo_grpo.tasks.retriever.client import RetrieverClient

ROOT = Path(__file__).parents[1]
NUM_WORDS = 30_000
PASSAGE_WORDS = 60
BAD_BODIES = (b"", b"nonsense", b"[]", b'{"queries": "x"}', b'{"queries": [1]}', b"x" * 2_000_000)


@dataclass
class Outcome:
    """What one client saw: seconds per request, and how many of its queries were answered right."""

    seconds: list[float]
    num_right: int
    num_asked: int


def words(number: int) -> list[str]:
    """Passage ``number``: frequent and rare words, and one that is its own."""
    rng = random.Random(number)
    drawn = [f"w{int(NUM_WORDS ** rng.random())}" for _ in range(PASSAGE_WORDS)]
    return [f"only{number}", *drawn]


def write_corpus(path: Path, num_passages: int) -> None:
    with path.open("w") as file:
        for number in range(num_passages):
            row = {"id": str(number), "title": f"Passage {number}", "text": " ".join(words(number))}
            file.write(json.dumps(row) + "\n")


@contextlib.contextmanager
def service(corpus: Path) -> Iterator[tuple[str, psutil.Process]]:
    """(url, process); it must end well at SIGTERM."""
    command = [sys.executable, "-m", "nemo_grpo.cli", "retriever", "serve"]
    command += ["--port", "0", "--corpus", str(corpus)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        yield line.split()[-1], psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        status = process.wait(60)
    if status != 0:
        raise SystemExit(f"the service ended with status {status}")


def processor_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def ask(url: str, client: int, num_requests: int, batch: int, num_passages: int, start: Event) -> Outcome:
    """One client's requests, one after the other."""
    retriever, rng = RetrieverClient(url), random.Random(client)
    start.wait()
    seconds, num_right = [], 0
    for _ in range(num_requests):
        wanted = [rng.randrange(num_passages) for _ in range(batch)]
        queries = [" ".join(words(number)[:6]) for number in wanted]
        begin = time.monotonic()
        found = retriever.search(queries, 3)
        seconds.append(time.monotonic() - begin)
        num_right += sum(f[0].id == str(number) for f, number in zip(found, wanted, strict=True) if f)
    return Outcome(seconds, num_right, num_requests * batch)


def pester(url: str, stop: Event) -> dict[int, int]:
    """Bad requests until told to stop; how many came back with which status."""
    counts: dict[int, int] = {}
    while not stop.is_set():
        for body in BAD_BODIES:
            try:
                urllib.request.urlopen(urllib.request.Request(f"{url}/search", body), timeout=60)
                status = 200
            except urllib.error.HTTPError as error:
                status = error.code
            counts[status] = counts.get(status, 0) + 1
        time.sleep(0.05)
    return counts


def _send(connection, function, arguments) -> None:
    connection.send(function(*arguments))
    connection.close()


def spawn(context, function, *arguments):
    """A process that runs the function; returns it and the end that its result comes out of."""
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(send, function, arguments))
    process.start()
    send.close()
    return process, receive


def measure(url: str, options: argparse.Namespace, batch: int) -> tuple[list[Outcome], float, dict[int, int]]:
    """All clients at once: outcomes, seconds from the first request to the last answer, bad requests."""
    context = multiprocessing.get_context("fork")
    start, stop = context.Event(), context.Event()
    asking = [
        spawn(context, ask, url, client, options.requests, batch, options.passages, start)
        for client in range(options.clients)
    ]
    pestering = spawn(context, pester, url, stop)
    time.sleep(1)
    begin = time.monotonic()
    start.set()
    outcomes = [receive.recv() for _, receive in asking]
    elapsed = time.monotonic() - begin
    stop.set()
    bad = pestering[1].recv()
    for process, _ in (*asking, pestering):
        process.join()
    return outcomes, elapsed, bad


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--passages", type=int, default=100_000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, default=100, help="of each client")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16], help="queries in a request")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.jsonl"
        write_corpus(corpus, options.passages)
        for name in ("built", "read from the disk"):
            begin = time.monotonic()
            with service(corpus) as (_, process):
                used, memory = processor_seconds(process), process.memory_info().rss / 1e6
                ready = f"ready after {time.monotonic() - begin:.1f} s ({used:.1f} s of a processor)"
                print(f"{options.passages} passages, index {name}: {ready}, {memory:.0f} MB")
        print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, {options.clients} clients\n")
        print(
            "| queries per request | queries/s | requests/s | processor ms per query "
            "| p50 ms | p95 ms | p99 ms | asked | right | bad |"
        )
        print("|---|---|---|---|---|---|---|---|---|---|")
        with service(corpus) as (url, process):
            for batch in options.batch:
                used = processor_seconds(process)
                outcomes, elapsed, bad = measure(url, options, batch)
                print(row(batch, outcomes, elapsed, bad, processor_seconds(process) - used))


def row(batch: int, outcomes: list[Outcome], elapsed: float, bad: dict[int, int], used: float) -> str:
    """One line of the table."""
    asked, right = (sum(getattr(o, f"num_{name}") for o in outcomes) for name in ("asked", "right"))
    times = sorted(second * 1e3 for outcome in outcomes for second in outcome.seconds)
    cuts = statistics.quantiles(times, n=100)
    shown = ", ".join(f"{count} x {status}" for status, count in sorted(bad.items()))
    return (
        f"| {batch} | {asked / elapsed:.0f} | {len(times) / elapsed:.0f} | {used / asked * 1e3:.2f} "
        f"| {cuts[49]:.0f} | {cuts[94]:.0f} | {cuts[98]:.0f} | {asked} | {right} | {shown} |"
    )


if __name__ == "__main__":
    main()
