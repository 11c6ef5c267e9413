"""A rehearsal's private Ray: starts it, notices its end, keeps its logs after a failure."""

import logging
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen

from nemo_grpo.engine.launch import reserved_port
from nemo_grpo.rehearsal import WARM
from nemo_grpo.rehearsal.environment import HERE, WARM_MODULES, Stack, background
from nemo_grpo.support.errors import how_ended

log = logging.getLogger(__name__)

RAY_PORTS = (
    "port",
    "ray-client-server-port",
    "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port",
    "metrics-export-port",
)
"""Ports of `ray start` whose defaults another Ray on this machine may have."""
WITHOUT = ("--include-dashboard=false", "--no-monitor")
"""Parts of Ray that a rehearsal does not use; each is another interpreter to start."""
SLOW_START = {
    "RAY_raylet_start_wait_time_s": "180",
    "RAY_agent_register_timeout_ms": "180000",
    "RAY_gcs_server_port_wait_time_s": "180",
}
"""Longer timeouts for Ray's start. Its default is 30 s, which one import may take on a busy machine."""
RAY_IS_UP = b"will now block forever"
"""Text that `ray start --block` prints when all its parts run. Its port answers earlier than that."""
RAY_PATIENCE = 180.0
"""Seconds for Ray to come up."""
TRIES = 3
"""Attempts: Ray 2.60 gives up if one of its agents takes longer than 15 s, which cannot be configured."""
CAUSES = ("raylet.err", "raylet.out", "gcs_server.err", "gcs_server.out", "dashboard_agent.log")
"""Logs in which Ray says why it ended."""
LAST_BYTES = 2000
"""Characters at the end of a log that a failure quotes."""

EXIT_NOT_STARTED = 69
"""Exit code if Ray did not start (EX_UNAVAILABLE): run the rehearsal again."""


class NotStarted(Exception):
    """Ray did not start, which says nothing about the recipe. The message has the cause."""


@dataclass(frozen=True)
class Cluster:
    """A running Ray.

    Attributes:
        environment: environment variables of the driver.
        process: ``ray start --block``, which ends when a part of Ray ends.
        sessions: process sessions of Ray and of the warm interpreters.
        folder: the rehearsal's folder.
    """

    environment: dict[str, str]
    process: Popen[bytes]
    sessions: tuple[int, ...]
    folder: Path

    @property
    def end(self) -> str | None:
        """Say why Ray is gone; None while it runs."""
        if self.process.poll() is None:
            return None
        path = self.folder / "ray.log"
        output = path.read_text(encoding="utf-8", errors="replace").strip()
        return f"Ray ended ({how_ended(self.process.returncode)}); {path}:\n{output[-LAST_BYTES:]}"


@contextmanager
def ray_cluster(stack: Stack, folder: Path, num_gpus: int) -> Iterator[Cluster]:
    """Run a private Ray with logical GPUs within the block; tries `TRIES` times."""
    reason = ""
    for attempt in range(1, TRIES + 1):
        with ExitStack() as running:
            try:
                cluster = running.enter_context(_started(stack, folder, num_gpus))
            except NotStarted as error:
                reason = str(error)
                log.warning("Ray did not start (attempt %d of %d): %s", attempt, TRIES, reason)
                continue
            yield cluster
            return
    raise NotStarted(f"Ray did not start in {TRIES} attempts; the last one: {reason}")


@contextmanager
def _started(stack: Stack, folder: Path, num_gpus: int) -> Iterator[Cluster]:
    """Run Ray and the warm interpreters within the block; raise `NotStarted` if Ray does not come up."""
    ray = [str(stack.python), "-c", "from ray.scripts.scripts import main; main()"]
    options = {"num-gpus": num_gpus, "num-cpus": 4 * num_gpus + 8, "object-store-memory": 512 << 20}
    with ExitStack() as running:
        enter = running.enter_context
        # Not in the rehearsal's folder: paths of Ray's sockets may have 107 characters at most.
        scratch = enter(tempfile.TemporaryDirectory(prefix="rehearsal-", ignore_cleanup_errors=True))
        options |= {name: enter(reserved_port()) for name in RAY_PORTS}
        environment = {**stack.environment(folder), **SLOW_START, WARM: scratch}
        command = [*ray, "start", "--head", "--block", *WITHOUT, f"--temp-dir={scratch}"]
        command += [f"--{name}={value}" for name, value in options.items()]
        out = enter((folder / "ray.log").open("wb"))
        enter(_keeping_logs(Path(scratch), folder))
        process = enter(background(command, environment, out))
        _await(process, folder, Path(scratch))
        sessions = [process.pid]
        # Start the warm interpreters after Ray, so that their imports do not delay it beyond its timeouts.
        for name, python in (("policy", stack.python), ("vllm", stack.vllm_python)):
            if python is not None:
                serve = [str(python), "-P", "-W", "ignore", str(HERE / "warm.py"), "serve"]
                serve += [f"{scratch}/{name}", *WARM_MODULES[name]]
                out = enter((folder / f"warm-{name}.log").open("wb"))
                server = enter(background(serve, environment, out))
                sessions.append(server.pid)
        environment["RAY_ADDRESS"] = f"127.0.0.1:{options['port']}"
        yield Cluster(environment, process, tuple(sessions), folder)


def _await(process: Popen[bytes], folder: Path, scratch: Path) -> None:
    """Wait until all parts of Ray run."""
    path = folder / "ray.log"
    deadline = time.monotonic() + RAY_PATIENCE
    while RAY_IS_UP not in path.read_bytes():
        if process.poll() is not None:
            raise NotStarted(f"{how_ended(process.returncode)}; {cause(scratch, path)}")
        if time.monotonic() > deadline:
            raise NotStarted(f"not up after {RAY_PATIENCE:.0f} s; {cause(scratch, path)}")
        time.sleep(0.2)


def cause(session: Path, path: Path) -> str:
    """Quote the ends of the logs in which Ray says why it ended."""
    logs = [session / "session_latest" / "logs" / name for name in CAUSES]
    quotes = []
    for log_file in (*logs, path):
        text = log_file.read_text(errors="replace").strip() if log_file.is_file() else ""
        if text:
            quotes.append(f"{log_file.name}: {text[-LAST_BYTES // 4 :]}")
    return "\n".join(quotes) if quotes else "it said nothing"


@contextmanager
def _keeping_logs(scratch: Path, folder: Path) -> Iterator[None]:
    """Keep Ray's logs in ``ray-session`` if the block fails."""
    try:
        yield
    except BaseException:
        logs = scratch / "session_latest" / "logs"
        if logs.is_dir():
            shutil.copytree(logs, folder / "ray-session", dirs_exist_ok=True, ignore_dangling_symlinks=True)
        raise
