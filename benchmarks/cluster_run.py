"""``python -m benchmarks.cluster_run RECIPE [key=value ...]``: a whole cluster run without a GPU.

Unlike `nemo-grpo rehearse`, which shrinks a recipe, this trains it unchanged: steps, sizes, problems and
model, which must be small enough. The driver of a real job runs in its own Ray; only what needs a GPU host is
replaced.
"""

import argparse
import logging
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from nemo_grpo.engine.checkpoint_store import CheckpointStore
from nemo_grpo.recipe import Recipe, load_recipe
from nemo_grpo.recipe.sections import GENERATION
from nemo_grpo.rehearsal import stages
from nemo_grpo.rehearsal.cluster import EXIT_NOT_STARTED, Cluster, NotStarted, ray_cluster
from nemo_grpo.rehearsal.environment import Stack, background, find_stack, stack_for
from nemo_grpo.rehearsal.export import conversion_of
from nemo_grpo.rehearsal.overrides import Override, cpu_settings, replaced, write_recipe
from nemo_grpo.rehearsal.replacements import CPU
from nemo_grpo.report.runs import METRICS_FILE
from nemo_grpo.run.signals import EXIT_INTERRUPTED, stop_on_signals
from nemo_grpo.support.errors import EXIT_USAGE, UserError, how_ended
from nemo_grpo.support.progress import progress

log = logging.getLogger(__name__)

RECIPE = "recipe.yaml"
LOG = "driver.log"


def main(argv: list[str] | None = None) -> int:
    """Run one recipe.

    Returns:
        The driver's exit code: 0 finished, 1 failed, 2 refused, 75 stopped with a checkpoint (continue with
        --resume); 69 if Ray did not start.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster_run", description=__doc__)
    parser.add_argument("recipe", type=Path, help="recipe with nemo_grpo.target: cluster")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--resume", action="store_true", help="continue from the run's newest checkpoint")
    parser.add_argument("--nemo-rl", type=Path, help="NeMo-RL's source; default: NEMO_RL_SRC")
    parser.add_argument("--python", type=Path, help="Python of .venv-nemo-rl")
    parser.add_argument("--vllm-python", type=Path, help="Python of .venv-vllm")
    arguments = parser.parse_intermixed_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        stack = find_stack(arguments.nemo_rl, arguments.python, arguments.vllm_python)
        recipe = load_recipe(arguments.recipe, arguments.overrides)
        folder = prepare(recipe, arguments.recipe, arguments.overrides, stack, resume=arguments.resume)
        return train(load_recipe(folder / RECIPE), stack, folder)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USAGE
    except (stages.Failed, NotStarted) as error:
        sys.stderr.write(f"failed: {error}\n")
        return EXIT_NOT_STARTED if isinstance(error, NotStarted) else 1


def prepare(recipe: Recipe, path: Path, overrides: Iterable[str], stack: Stack, *, resume: bool) -> Path:
    """Write the driver's recipe into the run's folder, and return the folder."""
    if stack.vllm_python is None:
        raise UserError("--vllm-python: there is no .venv-vllm; run `make venv-vllm`, or name a Python")
    stack_for(recipe, path, stack)
    folder = recipe.run_dir.absolute()
    if (folder / METRICS_FILE).is_file() and not resume:
        raise UserError(
            f"nemo_grpo.run_name={recipe.nemo_grpo.run_name}: {folder} holds a run; continue it with "
            "--resume, remove it, or choose another name"
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_recipe(folder / RECIPE, recipe, full_size_overrides(recipe))
    return folder


def full_size_overrides(recipe: Recipe) -> Iterator[Override]:
    """Yield the overrides for a machine without a GPU; steps, sizes, model and problems stay the recipe's."""
    always = cpu_settings(recipe.policy.max_total_sequence_length, uses_vllm=True) | {
        f"{GENERATION}.vllm_kwargs.max_num_seqs": recipe.num_sequences_per_step,
        "policy.model_name": str(Path(recipe.policy.model_name or "").absolute()),
        "nemo_grpo.runs_dir": str(Path(recipe.nemo_grpo.runs_dir).absolute()),
    }
    yield from (Override(key, value) for key, value in always.items())
    yield from replaced(recipe, CPU)


def train(recipe: Recipe, stack: Stack, folder: Path) -> int:
    """Run NeMo-RL's driver to its end in a private Ray and export its last checkpoint to ``hf``.

    A signal stops it after a step, with a checkpoint.
    """
    command = [str(stack.python), "-W", "ignore", "-m", "nemo_grpo.nemorl.run_grpo"]
    command += ["--config", str(folder / RECIPE)]
    log.info("starting Ray and NeMo-RL; its output: %s", folder / LOG)
    with (
        ray_cluster(stack, folder, recipe.cluster.gpus_per_node) as cluster,
        (folder / LOG).open("ab") as out,
        background(command, cluster.environment, out) as process,
    ):
        follow(process, cluster, recipe)
    code = process.returncode
    if code == EXIT_USAGE:
        raise UserError(f"the driver refuses the recipe:\n{stages.tail(folder / LOG)}")
    # The driver did not yet handle the signal of `follow`, whose default action ends a process.
    if code == -signal.SIGUSR1:
        raise stages.Failed("stopped before the driver handles signals, without a checkpoint; start it again")
    if code not in (0, EXIT_INTERRUPTED):
        raise stages.Failed(f"{how_ended(code)}; {folder / LOG}:\n{stages.tail(folder / LOG)}")
    newest = CheckpointStore(recipe.checkpoint_dir).latest()
    if code == 0 and newest is not None:
        arguments = conversion_of(recipe, newest, folder / "hf", Path(recipe.policy.model_name or ""))
        subprocess.run([sys.executable, *arguments], check=True)
    return int(code)


def follow(process: subprocess.Popen[bytes], cluster: Cluster, recipe: Recipe) -> None:
    """Show a line per step until the process ends, and pass a request to stop on."""
    num_shown = stages.last_step(recipe)
    was_signalled = False
    with stop_on_signals() as stop, progress("NeMo-RL", recipe.grpo.max_num_steps - num_shown) as advance:
        polls = stages.polls(process, cluster, recipe.run_dir / LOG)
        # Look once more after the end, because the last step may be logged after the last poll.
        for _ in chain(polls, [None]):
            for step in range(num_shown, stages.last_step(recipe)):
                num_shown = step + 1
                advance(standing(recipe))
            if stop and not was_signalled:
                process.send_signal(signal.SIGUSR1)
                was_signalled = True


def standing(recipe: Recipe) -> str:
    """Write the newest reward and validation in a few words."""
    newest: dict[str, float] = {}
    for row in stages.metrics(recipe):
        newest |= row
    metric_by_label = {"reward": "reward/mean", "validation": "validation/accuracy"}
    return ", ".join(f"{label} {newest[key]:.3f}" for label, key in metric_by_label.items() if key in newest)


if __name__ == "__main__":
    sys.exit(main())
