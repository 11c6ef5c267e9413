"""A rehearsal's Ray that does not come up or ends, and a driver that gets nowhere. No Ray, no NeMo-RL."""

import subprocess
import sys
import time
from unittest.mock import Mock

import pytest

from nemo_grpo.rehearsal import __main__ as command
from nemo_grpo.rehearsal import cluster, stages
from nemo_grpo.rehearsal.cluster import Cluster, NotStarted, ray_cluster
from nemo_grpo.rehearsal.environment import Stack, background
from nemo_grpo.rehearsal.stages import QUIET, SILENT, Failed, Progress, cpu_seconds_of, idle_share

LINE = "This command will now block forever until terminated by a signal."
WRITES = """
import pathlib, sys
scratch = next(a for a in sys.argv if a.startswith("--temp-dir=")).partition("=")[2]
logs = pathlib.Path(scratch, "session_latest", "logs")
logs.mkdir(parents=True)
(logs / "raylet.err").write_text("the agent did not register in time")
"""
FAILS = f"{WRITES}\nsys.exit(1)"


@pytest.fixture
def stack(tmp_path, monkeypatch):
    """A stack whose "Ray" is one of these programs, the first attempt's first; the last one stays."""
    monkeypatch.setattr(cluster, "WARM_MODULES", {"policy": (), "vllm": ()})

    def make(*programs):
        for number, program in enumerate(programs, 1):
            (tmp_path / f"ray{number}.py").write_text(program)
        python = tmp_path / "python"
        python.write_text(
            f'#!/bin/bash\ncd {tmp_path}\ncase $1 in -P) exec {sys.executable} "$@";; esac\n'
            "n=$(($(cat attempts 2>/dev/null || echo 0) + 1)); echo $n > attempts\n"
            f'[ -e ray$n.py ] || n={len(programs)}\nexec {sys.executable} ray$n.py "$@"\n'
        )
        python.chmod(0o755)
        return Stack(python, tmp_path, None)

    return make


def attempts(tmp_path):
    return int((tmp_path / "attempts").read_text())


def test_ray_that_fails_once_is_started_again(stack, tmp_path):
    up = f"{WRITES}\nimport time\nprint({LINE!r}, flush=True)\ntime.sleep(600)"
    with ray_cluster(stack(FAILS, up), tmp_path, 2) as ray:
        assert ray.end is None
        assert ray.environment["RAY_ADDRESS"].startswith("127.0.0.1:")
        assert ray.process.pid in ray.sessions
        assert len(ray.sessions) == 2, "the interpreters that workers are forked from belong to it"
    assert attempts(tmp_path) == 2


def test_ray_that_never_starts_is_no_refusal_and_says_why(stack, tmp_path, monkeypatch, capsys):
    why = r"in 3 attempts; .*exit code 1; raylet\.err: the agent did not"
    with pytest.raises(NotStarted, match=why), ray_cluster(stack(FAILS), tmp_path, 1):
        pytest.fail("it has not started")
    assert attempts(tmp_path) == 3
    assert (tmp_path / "ray-session" / "raylet.err").read_text() == "the agent did not register in time"

    not_started = Mock(side_effect=NotStarted("the agent did not register in time"))
    monkeypatch.setattr(command, "find_stack", not_started)
    code = command.main(["recipe.yaml", "--folder", str(tmp_path / "new")])
    assert code not in (0, 1, 2)
    assert "the agent did not register in time" in capsys.readouterr().err


@pytest.fixture
def ray(tmp_path):
    with (tmp_path / "ray.log").open("wb") as out:
        program = [sys.executable, "-c", "import time; print('raylet died', flush=True); time.sleep(600)"]
        with background(program, {}, out) as process:
            yield Cluster({}, process, (process.pid,), tmp_path)


def test_end_of_ray_ends_the_wait_for_the_driver(ray, tmp_path):
    (tmp_path / "driver.log").write_text("")
    with background([sys.executable, "-c", "import time; time.sleep(600)"], {}, subprocess.DEVNULL) as driver:
        polls = stages.polls(driver, ray, tmp_path / "driver.log")
        next(polls)
        while b"died" not in (tmp_path / "ray.log").read_bytes():
            time.sleep(0.01)
        ray.process.kill()
        ray.process.wait()
        with pytest.raises(stages.Failed, match=r"(?s)Ray ended \(killed by SIGKILL.*\); .*raylet died"):
            next(polls)


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """(log, progress, time and CPU seconds to set)."""
    state = {"now": 0.0, "cpu": 0.0}
    log = tmp_path / "driver.log"
    log.write_text("")
    monkeypatch.setattr(stages, "time", Mock(monotonic=lambda: state["now"]))
    monkeypatch.setattr(stages, "cpu_seconds_of", lambda _: state["cpu"])
    progress = Progress([log], [])
    return log, progress, state


def test_idle_driver_that_logs_nothing_is_stuck(watched):
    _, progress, state = watched
    state.update(now=QUIET - 1)
    progress.check()
    state.update(now=QUIET + 1, cpu=0.5 * idle_share() * QUIET)
    with pytest.raises(Failed, match="nothing was logged for 46 s, with 0"):
        progress.check()


def test_driver_that_logs_or_computes_is_stuck_only_after_a_long_silence(watched):
    log, progress, state = watched
    for _ in range(5):
        state["now"] += QUIET + 1
        log.write_text(log.read_text() + "step\n")
        progress.check()
    silent_since = state["now"]
    while state["now"] + QUIET < silent_since + SILENT:
        state["now"] += QUIET + 1
        state["cpu"] += 2 * idle_share() * QUIET
        progress.check()
    state.update(now=silent_since + SILENT + 1, cpu=state["cpu"] + SILENT)
    with pytest.raises(Failed, match="nothing was logged for"):
        progress.check()


def test_less_cpu_is_asked_for_on_a_busy_machine(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("os.getloadavg", lambda: (0.5, 0, 0))
    alone = idle_share()
    monkeypatch.setattr("os.getloadavg", lambda: (20.0, 0, 0))
    assert idle_share() == alone / 10


def test_cpu_time_is_that_of_a_sessions_processes():
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'sum(range(10**7))'])"
    program += "; print(flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1, start_new_session=True)
    try:
        process.stdout.readline()
        assert cpu_seconds_of(frozenset([process.pid])) > 0.05
        assert cpu_seconds_of(frozenset()) == 0
    finally:
        process.communicate(b"\n")
