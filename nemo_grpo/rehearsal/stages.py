"""The parts of a rehearsal, in order: preparation, training to a stop, resumed training, export."""

import logging
import re
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from nemo_grpo.engine.checkpoint_store import CheckpointStore
from nemo_grpo.engine.signals import EXIT_INTERRUPTED
from nemo_grpo.recipe import Recipe, load_recipe
from nemo_grpo.rehearsal import WARM
from nemo_grpo.rehearsal import overrides as small
from nemo_grpo.rehearsal.cluster import Cluster, ray_cluster
from nemo_grpo.rehearsal.environment import Stack, background, stack_for
from nemo_grpo.rehearsal.model import RehearsalModel, make_model
from nemo_grpo.rehearsal.overrides import STOP_AFTER, Override, Ranks
from nemo_grpo.rehearsal.progress import Progress, Stuck
from nemo_grpo.rehearsal.tiny_data import Problems, ToyTask, problems_of
from nemo_grpo.rehearsal.warm import warm_command
from nemo_grpo.report.runs import METRICS_FILE, json_lines
from nemo_grpo.support.errors import EXIT_USAGE, UserError, how_ended

log = logging.getLogger(__name__)

LAST_LINES = 15
POLL = 0.1
NOISE = re.compile(r"\x1b\[\d+m\(|nanobind: | - (leaked|\.\.\. skipped)|See https://nanobind")


@dataclass
class Rehearsal:
    """State of one rehearsal.

    Attributes: recipe: as it would be submitted.  taught: the same with what the small model learns as its
                task and prompt.  small: as it is run.  seconds: of each part.
                stopped_after: the step that SIGUSR1 came in.
                driver: what Python is given to run, before ``--config``.
    """

    folder: Path
    stack: Stack
    recipe: Recipe
    taught: Recipe
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


class Failed(Exception):
    """A stage failed; the message says where to look."""


def prepare(path: Path, overrides: Iterable[str], stack: Stack, folder: Path, max_ranks: int) -> Rehearsal:
    """Make the recipe, its problems and its model small; writes ``folder/recipe.yaml``.

    Raises: UserError: the recipe is refused, or cannot be rehearsed.
    """
    start = time.monotonic()
    overrides = list(overrides)
    recipe = load_recipe(path, overrides)
    stack = stack_for(recipe, path, stack)
    has_vllm = stack.vllm_python is not None
    folder.mkdir(parents=True)
    problems = problems_of(recipe, folder / "problems", stack.nemo_rl)
    lessons = {"task": problems.task, "prompt": problems.prompt}
    taught = recipe.model_copy(update={"nemo_grpo": recipe.nemo_grpo.model_copy(update=lessons)})
    task = ToyTask(taught, problems.task)
    num_validation = small.NUM_VALIDATION if recipe.grpo.validates else 0
    model = make_model(taught, task, num_validation, folder / "model")
    layout = small.reduced_ranks(small.ranks_of(recipe), max_ranks)
    changed = list(small.overrides_of(recipe, problems.task, model, layout, folder / "runs", has_vllm))
    file = folder / "recipe.yaml"
    small.write_recipe(file, path, overrides, changed)
    made = Rehearsal(folder, stack, recipe, taught, load_recipe(file), changed, layout, model, problems)
    made.seconds["preparation"] = time.monotonic() - start
    return made


def train(rehearsal: Rehearsal, *, stops: bool = True) -> None:
    """Run the driver up to a stop by SIGUSR1, then again to the end; without a stop once.

    Raises: UserError: the driver refuses the recipe.  Failed: exit codes other than 75, then 0; no progress;
            the end of Ray.  NotStarted: Ray does not come up.
    """
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
        is_told = stop_after is None
        for _ in polls(process, cluster, path):
            if not is_told and last_step(rehearsal.small) >= (stop_after or 0) - 1:
                process.send_signal(signal.SIGUSR1)
                is_told = True
        code = process.returncode
    if code == EXIT_USAGE:
        raise UserError(_last_error(path))
    if code != expected:
        raise Failed(f"{how_ended(code)} where exit code {expected} was expected; {path}:\n{tail(path)}")


def polls(process: subprocess.Popen[bytes], cluster: Cluster, path: Path) -> Iterator[None]:
    """Every now and then while the driver runs, as long as Ray runs and something gets on.

    Args:   path: the driver's log.
    Raises: Failed: Ray has ended, or nothing moves any more.
    """
    progress = Progress([path], [process.pid, *cluster.sessions])
    while process.poll() is None:
        if gone := cluster.end:
            raise Failed(gone)
        try:
            progress.check()
        except Stuck as stuck:
            raise Failed(f"the driver is stuck: {stuck}; {path}:\n{tail(path)}") from None
        yield
        time.sleep(POLL)


def last_step(recipe: Recipe) -> int:
    """The newest step whose update is logged; 0: none."""
    return max((int(row["step"]) for row in metrics(recipe) if "loss/total" in row), default=0)


def metrics(recipe: Recipe) -> list[dict[str, float]]:
    """The run's metrics.jsonl; a line that is being written is left out."""
    return list(json_lines(recipe.run_dir / METRICS_FILE))


def tail(path: Path, lines: int = LAST_LINES) -> str:
    """The end of a driver's log, without lines of workers, Triton's bindings and destructors."""
    text = path.read_text(encoding="utf-8", errors="replace").partition("\nException ignored in: ")[0]
    return "\n".join([line for line in text.splitlines() if not NOISE.match(line)][-lines:])


def _last_error(path: Path) -> str:
    text = path.read_text(encoding="utf-8", errors="replace")
    _, found, message = text.rpartition("error: ")
    return message.strip() if found else f"the driver refuses the recipe; see {path}"


def newest_checkpoint(rehearsal: Rehearsal) -> Path:
    """The last ``step_N``.

    Raises: Failed: there is none.
    """
    found = CheckpointStore(rehearsal.small.checkpoint_dir).latest()
    if found is None:
        raise Failed(f"no checkpoint in {rehearsal.small.checkpoint_dir}")
    return found


def run_python(rehearsal: Rehearsal, arguments: list[str], name: str) -> None:
    """Run a module of the stack's Python to its end.

    Raises: Failed: its exit code is not 0.
    """
    path = rehearsal.folder / name
    command = [str(rehearsal.stack.python), "-W", "ignore", *arguments]
    with path.open("wb") as out:
        code = subprocess.run(
            command, env=rehearsal.stack.environment(rehearsal.folder), stdout=out, stderr=subprocess.STDOUT
        ).returncode
    if code:
        raise Failed(f"{how_ended(code)}; {path}:\n{tail(path)}")
