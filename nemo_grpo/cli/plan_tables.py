"""The planner's tables on a terminal: memory, time, layouts, scaling."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from nemo_grpo.plan.forecast import Forecast
from nemo_grpo.plan.hardware import CPU
from nemo_grpo.plan.inputs import PlanInput
from nemo_grpo.plan.layouts import Found
from nemo_grpo.plan.memory import GIB
from nemo_grpo.plan.planner import Plan
from nemo_grpo.plan.rollout_time import kept_tokens
from nemo_grpo.plan.scaling import Point
from nemo_grpo.plan.step_time import ROLLOUT

_PHASES = ("training", "scoring", "refit")
OVERVIEW = "{:<22}{:>9}{:>9}{:>7}{:>12}{:>8}  {:>9}"


def _table(title: str, columns: Sequence[str], texts: Sequence[str]) -> Table:
    """Make a table with ``texts`` left-aligned, numbers right-aligned, and no broken word at 80 columns."""
    table = Table(title=title, box=SIMPLE_HEAD, collapse_padding=True, show_edge=False)
    for name in columns:
        if name in texts:
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name.replace(" ", "\n"), justify="right", no_wrap=True)
    return table


def memory_table(one: Plan) -> Table:
    """List the memory of one recipe by part and phase."""
    setup = one.setup
    place = f"{setup.num_nodes} x {setup.gpus_per_node} {one.gpu}"
    if one.gpu == CPU:
        place = f"this machine's CPUs, {setup.gpus_per_node} ranks"
    # a folder's path would widen the table
    model = Path(one.shape.name).name if Path(one.shape.name).is_absolute() else one.shape.name
    title = f"{one.name}: {model} on {place}"
    table = _table(title, ("per GPU", "GiB", "how"), ("per GPU", "how"))
    table.caption = (
        f"{_sizes(setup)} DP{one.data_parallel_size}; {one.num_stage_parameters / 1e9:.2f} of "
        f"{one.num_parameters / 1e9:.2f} B parameters per GPU; usable {one.usable_bytes / GIB:.1f} GiB; "
        + ("fits" if one.accepted else "does not fit")
    )
    for row in one.rows:
        table.add_row(row.part, f"{row.num_bytes / GIB:.1f}", row.how)
    for number, (phase, size) in enumerate(one.peaks.items()):
        how = f"of {one.usable_bytes / GIB:.1f} usable" if phase != "rollout weights" else ""
        if number == 0:
            table.add_section()
        table.add_row(f"[bold]{phase}[/bold]", f"[bold]{size / GIB:.1f}[/bold]", how)
    if one.cache_tokens:
        table.add_row("KV cache", "", _cache(one))
    return table


def overview(plans: list[Plan], price: float | None) -> Iterator[tuple[str, str | None]]:
    """Yield lines and their styles for several recipes; no name is broken at 80 columns."""
    usable = {plan.gpu: f"{plan.usable_bytes / GIB:.1f} usable on {plan.gpu}" for plan in plans}
    yield f"GiB per GPU, of {', '.join(usable.values())}", "bold"
    yield OVERVIEW.format("  layout", *_PHASES, "KV cache", "s/step", "GPU-hours"), "bold"
    for one in plans:
        yield f"{one.name}: {'fits' if one.accepted else 'refused'}", None if one.accepted else "red"
        sizes = [f"{one.peaks[key] / GIB:.1f}" if key in one.peaks else "-" for key in _PHASES]
        times = ("-", "-")
        if one.forecast:
            times = (seconds_of(one.forecast.step.seconds), cost(one.forecast, price))
        layout = f"  {_sizes(one.setup)} DP{one.data_parallel_size}"
        yield OVERVIEW.format(layout, *sizes, _cache(one), *times), None


def _cache(one: Plan) -> str:
    return (
        f"{one.cache_tokens / one.setup.max_length:.0f} x {one.setup.max_length}" if one.cache_tokens else "-"
    )


def time_table(found: Forecast) -> Table:
    """List the seconds of one step, phase by phase."""
    step, work = found.step, found.work
    sequence = sum(step.phases.values())
    table = _table("one step", ("phase", "s", "share"), ("phase",))
    for name, seconds in step.phases.items():
        if not seconds:
            continue
        times = f" x {work.num_draws:.1f} draws" if name in ROLLOUT and work.num_draws > 1 else ""
        times = f" x {work.scoring_passes}" if name == "scoring" and work.scoring_passes > 1 else times
        table.add_row(name + times, seconds_of(seconds, step.seconds), f"{seconds / sequence:.0%}")
    table.add_section()
    note = f"rollouts {step.rollout:.0f} s beside training {step.training:.0f} s" if step.age else ""
    table.add_row("[bold]step[/bold]", f"[bold]{seconds_of(step.seconds)}[/bold]", note)
    return table


def seconds_of(part: float, step: float | None = None) -> str:
    """Write the seconds of a step, or of a part of one; steps below 10 s get milliseconds."""
    return f"{part:.{1 if step else 0}f}" if (step or part) >= 10 else f"{part:.3f}"


def sentences(found: Forecast, price: float | None) -> list[str]:
    """Describe lengths, throughput, the run, the bottleneck, and the numbers' uncertainty."""
    step, work = found.step, found.work
    drafts = found.setup.draft_tokens
    kept, error = kept_tokens(drafts, work.acceptance), found.error
    low, high = map(seconds_of, error.around(step.seconds))
    accepted = f"accepted with {work.acceptance:.0%}: {kept:.1f} tokens per pass"
    return [
        f"responses per step: {work.num_samples}, on average {work.lengths.mean:.0f} tokens long "
        f"({work.lengths.source})",
        *([f"drafts: {drafts} per pass, {accepted}"] if drafts else []),
        f"throughput: {step.tokens_per_second_per_gpu:.0f} tokens/s/GPU, MFU of the update {step.mfu:.0%}",
        _run(found, price),
        f"bottleneck: {found.bottleneck}",
        f"uncertainty: with these lengths {low} to {high} s per step; such intervals hold "
        f"{error.covered:.0%} of {error.num_steps} {error.what}, predicted with a median error of "
        f"{error.median:.0%}, {error.worst:.0%} at worst",
    ]


def _run(found: Forecast, price: float | None) -> str:
    """Describe the whole run, or 100 steps of a run whose end the size of NeMo-RL's own data decides."""
    work = found.work
    if not work.or_passes:
        takes = f"{_duration(found.run_seconds)}, {cost(found, price)} GPU-hours"
        return f"run: {work.num_steps} steps, validations and checkpoints take {takes}"
    part = found.of_steps(min(work.num_steps, 100))
    takes = f"{_duration(part.run_seconds)}, {cost(part, price)} GPU-hours"
    return (
        f"run: {work.num_steps} steps{work.or_passes}, whichever ends first; every {part.work.num_steps} "
        f"steps, with their validations and checkpoints, take {takes}"
    )


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"


def cost(found: Forecast, price: float | None) -> str:
    """Write a run's GPU-hours as ``"1,234"``, or with a price as ``"1,234 ($3,085)"``.

    It is ``"-"`` for a run whose end is not known.
    """
    if found.work.or_passes:
        return "-"
    dollars = f" (${found.gpu_hours * price:,.0f})" if price is not None else ""
    return f"{found.gpu_hours:,.0f}{dollars}"


def best_table(base: Forecast, found: Sequence[Found]) -> Table:
    """List the fastest layouts."""
    title = f"fastest layouts that fit; the recipe's takes {base.step.seconds:.0f} s per step"
    table = _table(title, ("s/step", "gain", "tokens/s/GPU", "overrides"), ("overrides",))
    for one in found:
        step = one.forecast.step
        gain = base.step.seconds / step.seconds - 1
        text = " ".join(one.overrides) or "as it is"
        table.add_row(f"{step.seconds:.0f}", f"{gain:+.0%}", f"{step.tokens_per_second_per_gpu:.0f}", text)
    return table


def scale_table(points: Sequence[Point], price: float | None) -> Table:
    """List numbers of GPUs, each with its best layout: the same batch (strong), or a growing one (weak)."""
    numbers = ("GPUs", "own layout", "strong s/step", "efficiency", "GPU-hours", "weak s/step", "efficiency")
    texts = ("best layout, strong", "")
    table = _table("other numbers of GPUs, each with its best layout", (*numbers, *texts), texts)
    for point in points:
        if point.strong is None or point.weak is None:
            table.add_row(str(point.num_gpus), *"-" * 7, point.note)
            continue
        table.add_row(
            str(point.num_gpus),
            f"{point.own.step.seconds:.0f}" if point.own else "-",
            f"{point.strong.step.seconds:.0f}",
            f"{point.strong_efficiency:.0%}",
            cost(point.strong, price),
            f"{point.weak.step.seconds:.0f}",
            f"{point.weak_efficiency:.0%}",
            layout_text(point.strong.setup),
            point.note,
        )
    return table


def _sizes(setup: PlanInput) -> str:
    layout = setup.layout
    sizes = {"TP": layout.tensor, "PP": layout.pipeline, "CP": layout.context, "EP": layout.expert}
    return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1 or name == "TP")


def layout_text(setup: PlanInput) -> str:
    """Write a layout as ``"TP4 PP2 CP2, vLLM TP8, recomputed, 16 GPUs only sample"``."""
    parts = [_sizes(setup), f"vLLM TP{setup.vllm_tensor}"]
    parts += ["recomputed"] if setup.recompute else []
    parts += [f"{setup.num_rollout_gpus} GPUs only sample"] if setup.num_rollout_gpus else []
    return ", ".join(parts)
