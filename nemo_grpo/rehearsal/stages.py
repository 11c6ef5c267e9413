"""The parts of a rehearsal, in order: preparation, training to a stop, resumed training, export."""

import logging
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from nemo_grpo.engine.checkpoint_store import CheckpointStore
from nemo_grpo.recipe import Recipe, load_recipe
from nemo_grpo.rehearsal import WARM
from nemo_grpo.rehearsal import overrides as small
from nemo_grpo.rehearsal.cluster import Cluster, ray_cluster
from nemo_grpo.rehearsal.environment import Stack, background, stack_for
from nemo_grpo.rehearsal.model import RehearsalModel, make_model
from nemo_grpo.rehearsal.overrides import STOP_AFTER, Override, Ranks
from nemo_grpo.rehearsal.tiny_data import Problems, ToyTask, problems_of
from nemo_grpo.rehearsal.warm import warm_command
from nemo_grpo.report.runs import METRICS_FILE, json_lines
from nemo_grpo.run.signals import EXIT_INTERRUPTED
from nemo_grpo.support.errors import EXIT_USAGE, UserError, how_ended

log = logging.getLogger(__name__)

LAST_LINES = 15
"""Lines of a log that a failure quotes."""
POLL = 0.1
"""Seconds between two looks at the driver."""
QUIET = 45.0
"""Seconds without a line in the log after which CPU time decides whether the driver is stuck."""
SILENT = 1800.0
"""Seconds without a line in the log after which a driver counts as stuck, however busy it is."""
IDLE = 0.2
"""Least CPU cores that a working stack uses; Ray alone uses about 0.05."""
TICKS = os.sysconf("SC_CLK_TCK")
NOISE = re.compile(r"\x1b\[\d+m\(|nanobind: | - (leaked|\.\.\. skipped)|See https://nanobind")


class Failed(Exception):
    """A stage failed; the message says where to look."""


def fail_if(condition: bool, reason: str) -> None:
    """Raise `Failed` if the condition holds."""
    if condition:
        raise Failed(reason)


@dataclass
class Rehearsal:
    """State of one rehearsal.

    Attributes:
        folder: gets everything that the rehearsal writes.
        stack: the software that it runs on.
        recipe: the recipe as it would be submitted.
        toy_recipe: the recipe with the task and prompt that the small model has learnt.
        small: the recipe that the driver runs.
        changes: keys of the recipe that ``small`` overrides.
        layout: the reduced ranks.
        model: the small model.
        problems: the recipe's, or those that stand in for them.
        seconds: duration of each part.
        stopped_after: the step during which SIGUSR1 arrived.
        driver: arguments of Python before ``--config``.
    """

    folder: Path
    stack: Stack
    recipe: Recipe
    toy_recipe: Recipe
    small: Recipe
    changes: list[Override]
    layout: Ranks
    model: RehearsalModel
    problems: Problems
    seconds: dict[str, float] = field(default_factory=dict)
    stopped_after: int = STOP_AFTER
    driver: tuple[str, ...] = ("-m", "nemo_grpo.nemorl.run_grpo")

    @property
    def recipe_file(self) -> Path:
        """Path of the recipe that the driver is given."""
        return self.folder / "recipe.yaml"

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the block's time to `seconds`."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.monotonic() - start


def prepare(path: Path, overrides: Iterable[str], stack: Stack, folder: Path, max_ranks: int) -> Rehearsal:
    """Make the small problems, the small model and the small recipe, and write ``folder/recipe.yaml``."""
    start = time.monotonic()
    recipe = load_recipe(path, overrides)
    stack = stack_for(recipe, path, stack)
    uses_vllm = stack.vllm_python is not None
    folder.mkdir(parents=True)
    problems = problems_of(recipe, folder / "problems", stack.nemo_rl)
    toy_section = recipe.nemo_grpo.model_copy(update={"task": problems.task, "prompt": problems.prompt})
    toy_recipe = recipe.model_copy(update={"nemo_grpo": toy_section})
    task = ToyTask(toy_recipe, problems.task)
    num_validation = small.num_validation(recipe) if recipe.grpo.validates else 0
    model = make_model(
        toy_recipe,
        task,
        num_validation,
        folder / "model",
        replaces_nemo_rl_data=recipe.nemo_grpo.task is None,
    )
    layout = small.rehearsed_ranks(recipe, max_ranks)
    changes = list(small.overrides_of(recipe, problems.task, model, layout, folder / "runs", uses_vllm))
    file = folder / "recipe.yaml"
    small.write_recipe(file, recipe, changes)
    rehearsal = Rehearsal(
        folder=folder,
        stack=stack,
        recipe=recipe,
        toy_recipe=toy_recipe,
        # Load the written file, so that the checks see the same recipe as the driver.
        small=load_recipe(file),
        changes=changes,
        layout=layout,
        model=model,
        problems=problems,
    )
    rehearsal.seconds["preparation"] = time.monotonic() - start
    return rehearsal


def train(rehearsal: Rehearsal, *, stops: bool = True) -> None:
    """Run the driver up to a stop by SIGUSR1, then again to the end; with ``stops=False`` only once."""
    num_gpus = rehearsal.small.cluster.gpus_per_node
    with ray_cluster(rehearsal.stack, rehearsal.folder, num_gpus) as cluster:
        if stops:
            with rehearsal.timed("training to the stop"):
                _driver(rehearsal, cluster, "driver-1.log", EXIT_INTERRUPTED, small.STOP_AFTER)
            # The driver ends the step in which the signal arrives, and a step may be over before that.
            rehearsal.stopped_after = last_step(rehearsal.small)
        with rehearsal.timed("resumed" if stops else "training"):
            _driver(rehearsal, cluster, "driver-2.log", 0)


def _driver(
    rehearsal: Rehearsal, cluster: Cluster, name: str, expected: int, stop_after: int | None = None
) -> None:
    """Start NeMo-RL's driver as a job does, signal it to stop during step ``stop_after``, and wait."""
    path = rehearsal.folder / name
    environment = cluster.environment
    python = warm_command(str(rehearsal.stack.python), "policy", environment.get(WARM))
    command = [*python, "-W", "ignore", *rehearsal.driver, "--config", str(rehearsal.recipe_file)]
    with path.open("wb") as out, background(command, environment, out) as process:
        for _ in polls(process, cluster, path):
            # Step N - 1 is logged, so step N is running.
            if stop_after is not None and last_step(rehearsal.small) >= stop_after - 1:
                process.send_signal(signal.SIGUSR1)
                stop_after = None
        code = process.returncode
    if code == EXIT_USAGE:
        _, separator, message = path.read_text(errors="replace").rpartition("error: ")
        raise UserError(message.strip() if separator else f"the driver refuses the recipe; see {path}")
    if code != expected:
        raise Failed(f"{how_ended(code)} where exit code {expected} was expected; {path}:\n{tail(path)}")


class Progress:
    """Watches one start of the driver by its log and the CPU time of its processes.

    A fixed time limit would end a slow run on a busy machine, and wait too long for a dead one on a quiet
    machine.

    Attributes:
        logs: files that grow while it works.
        sessions: process sessions of the driver and of Ray.
        sizes: sizes of the logs when they last grew, bytes.
        grown_at: time when they last grew.
        measured_at: time of the last measurement of CPU time.
        cpu_seconds: CPU time of the sessions at that measurement.
    """

    def __init__(self, logs: Iterable[Path], sessions: Iterable[int]) -> None:
        self.logs = tuple(logs)
        self.sessions = frozenset(sessions)
        self.sizes = self._sizes()
        self.grown_at = time.monotonic()
        self._measure(self.grown_at)

    def check(self) -> None:
        """Raise `Failed` if nothing was logged and the processes were idle for `QUIET`, or for `SILENT`."""
        now = time.monotonic()
        sizes = self._sizes()
        if sizes != self.sizes:
            self.sizes = sizes
            self.grown_at = now
            self._measure(now)
            return
        silence = now - self.grown_at
        if silence > SILENT:
            raise Failed(f"nothing was logged for {silence:.0f} s")
        elapsed = now - self.measured_at
        if elapsed > QUIET:
            busy_cores = (cpu_seconds_of(self.sessions) - self.cpu_seconds) / elapsed
            # It is negative if a process has ended, whose CPU time is no longer counted. That is progress.
            if 0 <= busy_cores < idle_share():
                raise Failed(f"nothing was logged for {silence:.0f} s, with {busy_cores:.2f} CPU cores busy")
            self._measure(now)

    def _measure(self, now: float) -> None:
        self.measured_at = now
        self.cpu_seconds = cpu_seconds_of(self.sessions)

    def _sizes(self) -> tuple[int, ...]:
        return tuple(path.stat().st_size if path.exists() else 0 for path in self.logs)


def idle_share() -> float:
    """Return `IDLE`, less on a machine with more work than cores."""
    return IDLE / max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def cpu_seconds_of(sessions: frozenset[int]) -> float:
    """Add up the CPU time of these sessions' processes, and of their children that have ended."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except OSError:
            # The process has ended since the folder was listed.
            continue
        # The process name in parentheses may contain spaces, so count the fields after it, see proc(5).
        fields = text.rpartition(")")[2].split()
        session = int(fields[3])
        if session in sessions:
            # utime, stime, cutime, cstime
            ticks += sum(map(int, fields[11:15]))
    return ticks / TICKS


def polls(process: subprocess.Popen[bytes], cluster: Cluster, path: Path) -> Iterator[None]:
    """Yield every `POLL` seconds while the driver runs; raise `Failed` if Ray ends or the driver is stuck."""
    progress = Progress([path], [process.pid, *cluster.sessions])
    while process.poll() is None:
        reason = cluster.end
        if reason is not None:
            raise Failed(reason)
        try:
            progress.check()
        except Failed as stuck:
            raise Failed(f"the driver is stuck: {stuck}; {path}:\n{tail(path)}") from None
        yield
        time.sleep(POLL)


def last_step(recipe: Recipe) -> int:
    """Find the newest step whose update is logged; 0: none."""
    steps = [int(row["step"]) for row in metrics(recipe) if "loss/total" in row]
    return max(steps, default=0)


def metrics(recipe: Recipe) -> list[dict[str, float]]:
    """Read the run's metrics.jsonl, without a line that is being written."""
    return list(json_lines(recipe.run_dir / METRICS_FILE))


def tail(path: Path) -> str:
    """Quote the end of a driver's log, without lines of workers, Triton's bindings and destructors."""
    text = path.read_text(encoding="utf-8", errors="replace")
    # Destructors fail at the end of a process that has failed before, and hide the reason.
    text = text.partition("\nException ignored in: ")[0]
    lines = [line for line in text.splitlines() if not NOISE.match(line)]
    return "\n".join(lines[-LAST_LINES:])


def newest_checkpoint(rehearsal: Rehearsal) -> Path:
    """Find the last ``step_N``."""
    newest = CheckpointStore(rehearsal.small.checkpoint_dir).latest()
    if newest is None:
        raise Failed(f"no checkpoint in {rehearsal.small.checkpoint_dir}")
    return newest


def run_python(rehearsal: Rehearsal, arguments: list[str], name: str) -> None:
    """Run a module of the stack's Python to its end."""
    path = rehearsal.folder / name
    environment = rehearsal.stack.environment(rehearsal.folder)
    command = [str(rehearsal.stack.python), "-W", "ignore", *arguments]
    with path.open("wb") as out:
        code = subprocess.run(command, env=environment, stdout=out, stderr=subprocess.STDOUT).returncode
    if code:
        raise Failed(f"{how_ended(code)}; {path}:\n{tail(path)}")
