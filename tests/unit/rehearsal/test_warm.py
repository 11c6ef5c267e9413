"""Warm interpreters: a fork does what the asked-for interpreter would, and ends as it would."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from nemo_grpo.rehearsal import environment
from nemo_grpo.rehearsal.environment import background
from nemo_grpo.rehearsal.warm import warm_command

WARM = Path(environment.__file__).with_name("warm.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With the socket of a server that has imported decimal."""
    folder = tmp_path_factory.mktemp("w")
    command = [sys.executable, "-P", str(WARM), "serve", str(folder / "policy"), "decimal"]
    with background(command, dict(os.environ), subprocess.DEVNULL):
        yield folder


def run(folder, *arguments, **further):
    command = [*warm_command(sys.executable, "policy", str(folder) if folder else None), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **further)


def test_fork_has_the_requesters_arguments_environment_folder_and_streams(folder, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "print('decimal' in sys.modules, sys.argv[1:], os.environ['ASKED'], os.getcwd(), sys.stdin.read())\n"
    )
    given = {"env": {**os.environ, "ASKED": "x"}, "cwd": tmp_path, "input": "in"}
    for server, imported in ((folder, True), (None, False)):  # without one, an interpreter says the same
        done = run(server, "-u", str(script), "a", "b c", **given)
        assert done.stdout == f"{imported} ['a', 'b c'] x {tmp_path} in\n"


def test_a_fork_ends_with_its_own_status(folder, tmp_path):
    (tmp_path / "ends.py").write_text("import sys; sys.exit(75)")
    assert run(folder, "-m", "ends", env={**os.environ, "PYTHONPATH": str(tmp_path)}).returncode == 75
    assert run(folder, "-c", "import sys; sys.exit(len(sys.argv))", "a", "b").returncode == 3
    (tmp_path / "fails.py").write_text("raise ValueError('told')")
    done = run(folder, str(tmp_path / "fails.py"))
    assert done.returncode == 1
    assert "ValueError: told" in done.stderr


def test_signals_reach_the_fork(folder, tmp_path):
    script = tmp_path / "waits.py"
    script.write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))\n"
        "open(sys.argv[1], 'w').close()\n"
        "time.sleep(60)\n"
    )
    command = [*warm_command(sys.executable, "policy", str(folder)), str(script), str(tmp_path / "ready")]
    with subprocess.Popen(command) as process:
        while not (tmp_path / "ready").exists():
            time.sleep(0.05)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(30) == 75


def test_a_server_that_cannot_import_is_left_out(tmp_path):
    command = [sys.executable, "-P", str(WARM), "serve", str(tmp_path / "policy"), "no_such_module"]
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 1
    assert run(tmp_path, "-c", "import sys; print(sys.argv[1])", "alone").stdout == "alone\n"


def test_a_background_process_ends_with_the_one_that_started_it(tmp_path):
    """Also when that one is killed."""
    pid_file = tmp_path / "pid"
    starter = (
        "import os, subprocess, sys, time\n"
        "from nemo_grpo.rehearsal.environment import background\n"
        "with background(['sleep', '60'], dict(os.environ), subprocess.DEVNULL) as process:\n"
        f"    open({str(pid_file)!r}, 'w').write(str(process.pid))\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", starter]) as process:
        while not (pid_file.exists() and pid_file.read_text()):
            time.sleep(0.05)
        process.kill()
        process.wait()
    assert has_ended(int(pid_file.read_text()))


def has_ended(pid):
    """Wait for the end of a process, which nobody may have waited for yet."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with suppress(FileNotFoundError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.05)
                continue
        return True
    return False


WAITS = "import os, signal, time\n{}\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n"


def killed_command(folder, first=""):
    """A fork, whose program begins so, of a command that is killed."""
    command = [*warm_command(sys.executable, "policy", str(folder)), "-c", WAITS.format(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        fork = int(process.stdout.readline())
        assert Path(f"/proc/{fork}").exists()
        process.kill()
    return fork


def test_fork_of_a_killed_command_is_ended(folder):
    assert has_ended(killed_command(folder))


def test_forks_end_with_their_server_even_if_they_ignore_signals(tmp_path):
    """As a driver that takes SIGTERM for a request to save while Ray is gone."""
    serve = [sys.executable, "-P", str(WARM), "serve", str(tmp_path / "policy"), "decimal"]
    with background(serve, dict(os.environ), subprocess.DEVNULL):
        fork = killed_command(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN)")
        os.kill(int(Path(f"/proc/{fork}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
    assert has_ended(fork)
