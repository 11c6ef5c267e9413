"""The parts of a rehearsal, in order: preparation, training to a stop, resumed training, export."""

import logging
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
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
POLL = 0.1
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


@dataclass
class Rehearsal:
    """State of one rehearsal.

    Attributes: recipe: as it would be submitted.  toy_recipe: with the task and prompt that the small model
                has learnt.  small: as it is run.  seconds: of each part.
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
    """Make the recipe, its problems and its model small; writes ``folder/recipe.yaml``."""
    start = time.monotonic()
    recipe = load_recipe(path, overrides)
    stack = stack_for(recipe, path, stack)
    has_vllm = stack.vllm_python is not None
    folder.mkdir(parents=True)
    problems = problems_of(recipe, folder / "problems", stack.nemo_rl)
    toy = {"task": problems.task, "prompt": problems.prompt}
    toy_recipe = recipe.model_copy(update={"nemo_grpo": recipe.nemo_grpo.model_copy(update=toy)})
    task = ToyTask(toy_recipe, problems.task)
    num_validation = small.num_validation(recipe) if recipe.grpo.validates else 0
    model = make_model(toy_recipe, task, num_validation, folder / "model")
    layout = small.rehearsed_ranks(recipe, max_ranks)
    changed = list(small.overrides_of(recipe, problems.task, model, layout, folder / "runs", has_vllm))
    file = folder / "recipe.yaml"
    small.write_recipe(file, recipe, changed)
    made = Rehearsal(folder, stack, recipe, toy_recipe, load_recipe(file), changed, layout, model, problems)
    made.seconds["preparation"] = time.monotonic() - start
    return made


def train(rehearsal: Rehearsal, *, stops: bool = True) -> None:
    """Run the driver up to a stop by SIGUSR1, then again to the end; without a stop once."""
    num_gpus = rehearsal.small.cluster.gpus_per_node
    with ray_cluster(rehearsal.stack, rehearsal.folder, num_gpus) as cluster:
        if stops:
            with rehearsal.timed("training to the stop"):
                _driver(rehearsal, cluster, "driver-1.log", EXIT_INTERRUPTED, small.STOP_AFTER)
            rehearsal.stopped_after = last_step(rehearsal.small)
        with rehearsal.timed("resumed" if stops else "training"):
            _driver(rehearsal, cluster, "driver-2.log", 0)


def _driver(
    rehearsal: Rehearsal, cluster: Cluster, name: str, expected: int, stop_after: int | None = None
) -> None:
    """Start NeMo-RL's driver as a job does, signal it to stop during step ``stop_after``, and wait."""
    path, environment = rehearsal.folder / name, cluster.environment
    python = warm_command(str(rehearsal.stack.python), "policy", environment.get(WARM))
    command = [*python, "-W", "ignore", *rehearsal.driver, "--config", str(rehearsal.recipe_file)]
    with path.open("wb") as out, background(command, environment, out) as process:
        for _ in polls(process, cluster, path):
            if stop_after is not None and last_step(rehearsal.small) >= stop_after - 1:
                process.send_signal(signal.SIGUSR1)
                stop_after = None
        code = process.returncode
    if code == EXIT_USAGE:
        _, found, message = path.read_text(errors="replace").rpartition("error: ")
        raise UserError(message.strip() if found else f"the driver refuses the recipe; see {path}")
    if code != expected:
        raise Failed(f"{how_ended(code)} where exit code {expected} was expected; {path}:\n{tail(path)}")


class Progress:
    """Watches one start of the driver by its log and the CPU time of its processes.

    A fixed time limit would end a slow run on a busy machine, and wait too long for a dead one on a quiet
    machine.

    Args: logs: files that grow while it works.  sessions: process sessions of the driver and of Ray.
    """

    def __init__(
        self,
        logs: Iterable[Path],
        sessions: Iterable[int],
        *,
        clock: Callable[[], float] = time.monotonic,
        cpu_seconds: Callable[[frozenset[int]], float] | None = None,
    ) -> None:
        self.logs, self.sessions, self.clock = tuple(logs), frozenset(sessions), clock
        self.cpu_seconds = cpu_seconds or cpu_seconds_of
        self.sizes = self._sizes()
        self.said = self.looked = clock()
        self.used = self.cpu_seconds(self.sessions)

    def check(self) -> None:
        """Raise `Failed` if nothing was logged and the processes were idle for `QUIET`, or for `SILENT`."""
        now, sizes = self.clock(), self._sizes()
        if sizes != self.sizes:
            self.sizes, self.said = sizes, now
            self._mark(now)
        elif now - self.said > SILENT:
            raise Failed(f"nothing was logged for {now - self.said:.0f} s")
        elif now - self.looked > QUIET:
            used = (self.cpu_seconds(self.sessions) - self.used) / (now - self.looked)
            if 0 <= used < idle_share():  # negative: a process has ended, so something happened
                raise Failed(
                    f"nothing was logged for {now - self.said:.0f} s, with {used:.2f} CPU cores busy"
                )
            self._mark(now)

    def _mark(self, now: float) -> None:
        self.looked, self.used = now, self.cpu_seconds(self.sessions)

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
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[3]) in sessions:
            ticks += sum(map(int, fields[11:15]))
    return ticks / TICKS


def polls(process: subprocess.Popen[bytes], cluster: Cluster, path: Path) -> Iterator[None]:
    """Yield every `POLL` seconds while the driver runs; fail if Ray ends or the driver is stuck.

    Args: path: the driver's log.
    """
    progress = Progress([path], [process.pid, *cluster.sessions])
    while process.poll() is None:
        if gone := cluster.end:
            raise Failed(gone)
        try:
            progress.check()
        except Failed as stuck:
            raise Failed(f"the driver is stuck: {stuck}; {path}:\n{tail(path)}") from None
        yield
        time.sleep(POLL)


def last_step(recipe: Recipe) -> int:
    """Find the newest step whose update is logged; 0: none."""
    return max((int(row["step"]) for row in metrics(recipe) if "loss/total" in row), default=0)


def metrics(recipe: Recipe) -> list[dict[str, float]]:
    """Read the run's metrics.jsonl, without a line that is being written."""
    return list(json_lines(recipe.run_dir / METRICS_FILE))


def tail(path: Path) -> str:
    """Quote the end of a driver's log, without lines of workers, Triton's bindings and destructors."""
    text = path.read_text(encoding="utf-8", errors="replace").partition("\nException ignored in: ")[0]
    return "\n".join([line for line in text.splitlines() if not NOISE.match(line)][-LAST_LINES:])


def newest_checkpoint(rehearsal: Rehearsal) -> Path:
    """Find the last ``step_N``."""
    found = CheckpointStore(rehearsal.small.checkpoint_dir).latest()
    if found is None:
        raise Failed(f"no checkpoint in {rehearsal.small.checkpoint_dir}")
    return found


def run_python(rehearsal: Rehearsal, arguments: list[str], name: str) -> None:
    """Run a module of the stack's Python to its end."""
    path, environment = rehearsal.folder / name, rehearsal.stack.environment(rehearsal.folder)
    command = [str(rehearsal.stack.python), "-W", "ignore", *arguments]
    with path.open("wb") as out:
        code = subprocess.run(command, env=environment, stdout=out, stderr=subprocess.STDOUT).returncode
    if code:
        raise Failed(f"{how_ended(code)}; {path}:\n{tail(path)}")
