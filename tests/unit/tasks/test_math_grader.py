"""The workers that compare mathematical answers: they die without harm, and with their parent."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing

import psutil
import pytest
from processes import wait_for

from nemo_grpo.support import extensions
from nemo_grpo.tasks.rewards import worker_pool
from nemo_grpo.tasks.rewards.math_grader import MathGrader

BOMB = "9^{9^{9^9}}"
BUSY = """
import time

def busy(response):
    end = time.process_time() + float(response)
    while time.process_time() < end:
        pass
    return 1.0
"""


def own_function(reference):
    """A pool whose workers run a function of a file."""
    job = ("own_function", sys.path, extensions.texts_of([reference]), reference)
    return worker_pool.WorkerPool(job, "no worker")


@pytest.fixture
def grader(monkeypatch):
    monkeypatch.setattr(worker_pool, "CPU_SECONDS", 0.4)
    with closing(MathGrader()) as grader:
        yield grader


@pytest.fixture
def wall_limit(monkeypatch):
    """Set the wall limit of a request, whatever its number of responses."""

    def set_limit(seconds):
        monkeypatch.setattr(worker_pool, "WALL_SECONDS", seconds)
        monkeypatch.setattr(worker_pool, "WALL_SECONDS_PER_RESPONSE", 0.0)

    return set_limit


def workers(pid=None):
    return [p for p in psutil.Process(pid).children() if "worker.py" in " ".join(p.cmdline())]


def started_by(grader):
    """The worker that a first comparison starts."""
    before = set(workers())
    assert grader.equal("1/2", "0.5")
    (worker,) = set(workers()) - before
    return worker


def test_equal_texts_and_different_integers_need_no_worker(grader):
    before = len(workers())
    assert grader.equal(r"\frac{1}{2}", r"\dfrac{1}{2}")
    assert not grader.equal("", "")
    assert not grader.equal("999999999999999", "999999999999998")
    assert grader.same("7", "70") is False
    assert len(workers()) == before
    assert grader.equal("7", "7.0")  # these are for math-verify
    assert not grader.equal("7", "7.5")


def test_answer_beyond_the_limit_is_wrong_asked_once_and_the_next_one_is_graded(grader):
    assert [grader.equal("5", BOMB) for _ in range(2)] == [False, False]
    assert grader.num_killed == 1
    assert grader.equal("1/4", "0.25")
    assert grader.undecided(" 5", f"${BOMB}$")  # for its reference only
    assert not grader.undecided("6", BOMB)


def test_a_pathological_reference_harms_no_other_problem(grader):
    assert not grader.equal(BOMB, "1/2")
    assert grader.undecided(BOMB, "1/2")
    assert grader.same("1/2", "0.5") is True
    assert [grader.same("7", BOMB) for _ in range(2)] == [None, None]
    assert grader.num_killed == 2  # a pair without a verdict is compared once


def test_stopped_worker_is_replaced_after_the_wall_limit_and_its_request_asked_again(wall_limit):
    wall_limit(1.0)
    grader = MathGrader()
    before = set(workers())
    started_by(grader).suspend()
    start = time.monotonic()
    assert grader.equal("1/4", "0.25")
    assert time.monotonic() - start > 0.9
    assert grader.num_killed == 0
    grader.close()
    assert set(workers()) == before


def test_request_at_which_every_worker_stands_still_has_no_reply_after_two(tmp_path, wall_limit):
    (tmp_path / "own.py").write_text("import time\n\ndef still(response):\n    time.sleep(60)\n")
    wall_limit(0.5)
    with closing(own_function(f"{tmp_path}/own.py:still")) as pool:
        start = time.monotonic()
        assert pool.ask(({"response": ""}, None)) is None
        assert time.monotonic() - start > 0.9
        assert pool.num_killed == 1


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux's affinities")
def test_wall_limit_leaves_out_the_time_without_a_core(tmp_path, wall_limit):
    """Half a second of work takes two seconds beside four others on one core; the limit is one second."""
    cores = os.sched_getaffinity(0)
    (tmp_path / "own.py").write_text(BUSY)
    wall_limit(1.0)
    with closing(own_function(f"{tmp_path}/own.py:busy")) as pool:
        assert pool.ask(({"response": "0"}, None)) == b'{"values": [1.0]}'
        (worker,) = pool._idle
        os.sched_setaffinity(worker._process.pid, {min(cores)})
        burning = f"import os; os.sched_setaffinity(0, [{min(cores)}])\nwhile True: pass"
        others = [subprocess.Popen([sys.executable, "-c", burning]) for _ in range(4)]
        try:
            start = time.monotonic()
            assert pool.ask(({"response": "0.5"}, None)) == b'{"values": [1.0]}'
            assert time.monotonic() - start > 1.0
            assert pool.num_killed == 0
        finally:
            for other in others:
                other.kill()
                other.wait()


def test_worker_is_replaced_when_killed_and_after_its_number_of_requests(grader, monkeypatch):
    started_by(grader).kill()
    assert not grader.equal("1/4", "0.25")  # nobody can know whether the answer killed it
    monkeypatch.setattr(worker_pool, "REQUESTS_PER_WORKER", 2)
    for answer, num_idle in (("0.125", 1), ("0.1250", 0)):
        assert grader.equal("1/8", answer)
        assert len(grader._idle) == num_idle


def test_worker_that_does_not_start_is_an_error_and_not_a_zero(tmp_path, monkeypatch):
    broken = tmp_path / "broken.py"
    broken.write_text("raise ImportError('math_verify')")
    monkeypatch.setattr(worker_pool, "SCRIPT", broken)
    with pytest.raises(RuntimeError, match="is math-verify in"):
        MathGrader().equal("1/2", "0.5")


def test_forked_daemon_starts_its_own_worker_and_keeps_the_parents_alive(grader):
    def grade():
        verdicts = [grader.equal("1/4", "0.25"), grader.equal("1/4", "0.2")]
        grader.close()
        there.send(verdicts)

    assert grader.equal("1/2", "0.5")
    before = set(workers())
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=grade, daemon=True)  # which may have no children of multiprocessing's
    process.start()
    assert here.recv() == [True, False]
    process.join()
    here.close()
    there.close()
    assert grader.equal("1/8", "0.125")
    assert set(workers()) == before


SCRIPT = """
import sys, threading, time
from nemo_grpo.tasks.rewards import worker_pool
from nemo_grpo.tasks.rewards.math_grader import MathGrader
worker_pool.CPU_SECONDS = 2.0
grader = MathGrader()
grader.equal("1/2", "0.5")
if sys.argv[1] == "busy":
    threading.Thread(target=grader.equal, args=("5", "1000000000!"), daemon=True).start()
print("ready", flush=True)
time.sleep(0 if sys.argv[1] == "returns" else 600)
"""


@pytest.mark.parametrize("case", ["returns", "idle", "busy"])
def test_workers_end_with_their_parent_even_if_it_is_killed(case):
    parent = subprocess.Popen([sys.executable, "-c", SCRIPT, case], stdout=subprocess.PIPE, text=True)
    assert parent.stdout.readline() == "ready\n"
    children = [] if case == "returns" else workers(parent.pid)
    assert case == "returns" or len(children) == 1
    if case != "returns":
        parent.kill()
    assert parent.wait(timeout=60) == (0 if case == "returns" else -signal.SIGKILL)
    parent.stdout.close()
    wait_for(lambda: not any(child.is_running() and child.status() != "zombie" for child in children))


def test_worker_that_compares_answers_loads_no_torch(grader):
    loaded = [library.path for library in started_by(grader).memory_maps()]
    assert any("python" in path for path in loaded)
    assert not any("torch" in path for path in loaded)


def test_closing_while_another_thread_waits_ends_the_wait(grader):
    grader.equal("1/2", "0.5")
    grader.arguments = ("60.0", grader.arguments[1])
    grader.close()
    verdicts = []
    thread = threading.Thread(target=lambda: verdicts.append(grader.equal("5", "1000000000!")))
    thread.start()
    wait_for(lambda: len(grader._busy) == 1)
    grader.close()
    thread.join(timeout=60)
    assert verdicts == [False]
