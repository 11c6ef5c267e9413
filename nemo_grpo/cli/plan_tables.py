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


def memory_table(plan: Plan) -> Table:
    """List the memory of one recipe by part and phase."""
    setup = plan.setup
    place = f"{setup.num_nodes} x {setup.gpus_per_node} {plan.gpu}"
    if plan.gpu == CPU:
        place = f"this machine's CPUs, {setup.gpus_per_node} ranks"
    model = plan.shape.name
    # The whole path of a model folder would make the table too wide.
    if Path(model).is_absolute():
        model = Path(model).name
    title = f"{plan.name}: {model} on {place}"
    usable = f"{plan.usable_bytes / GIB:.1f}"
    verdict = "fits" if plan.accepted else "does not fit"
    table = _table(title, ("per GPU", "GiB", "how"), ("per GPU", "how"))
    table.caption = (
        f"{_sizes(setup)} DP{plan.data_parallel_size}; {plan.num_stage_parameters / 1e9:.2f} of "
        f"{plan.num_parameters / 1e9:.2f} B parameters per GPU; usable {usable} GiB; {verdict}"
    )
    for row in plan.rows:
        table.add_row(row.part, f"{row.num_bytes / GIB:.1f}", row.how)
    if plan.peaks:
        table.add_section()
    for phase, size in plan.peaks.items():
        how = "" if phase == "rollout weights" else f"of {usable} usable"
        table.add_row(f"[bold]{phase}[/bold]", f"[bold]{size / GIB:.1f}[/bold]", how)
    if plan.cache_tokens:
        table.add_row("KV cache", "", _cache(plan))
    return table


def overview(plans: list[Plan], price: float | None) -> Iterator[tuple[str, str | None]]:
    """Yield lines with their styles, a few per recipe, that fit into 80 columns without broken names."""
    usable = {plan.gpu: f"{plan.usable_bytes / GIB:.1f} usable on {plan.gpu}" for plan in plans}
    yield f"GiB per GPU, of {', '.join(usable.values())}", "bold"
    yield OVERVIEW.format("  layout", *_PHASES, "KV cache", "s/step", "GPU-hours"), "bold"
    for plan in plans:
        verdict = "fits" if plan.accepted else "refused"
        yield f"{plan.name}: {verdict}", None if plan.accepted else "red"
        sizes = [f"{plan.peaks[phase] / GIB:.1f}" if phase in plan.peaks else "-" for phase in _PHASES]
        seconds = "-"
        gpu_hours = "-"
        if plan.forecast:
            seconds = seconds_of(plan.forecast.step.seconds)
            gpu_hours = cost(plan.forecast, price)
        layout = f"  {_sizes(plan.setup)} DP{plan.data_parallel_size}"
        yield OVERVIEW.format(layout, *sizes, _cache(plan), seconds, gpu_hours), None


def _cache(plan: Plan) -> str:
    """Write how many sequences of the longest length the cache holds."""
    if not plan.cache_tokens:
        return "-"
    length = plan.setup.max_length
    return f"{plan.cache_tokens / length:.0f} x {length}"


def time_table(forecast: Forecast) -> Table:
    """List the seconds of one step, phase by phase."""
    step = forecast.step
    work = forecast.work
    phase_seconds = sum(step.phases.values())
    table = _table("one step", ("phase", "s", "share"), ("phase",))
    for name, seconds in step.phases.items():
        if not seconds:
            continue
        label = name
        # Dynamic sampling repeats the rollouts until enough groups have signal.
        if name in ROLLOUT and work.num_draws > 1:
            label += f" x {work.num_draws:.1f} draws"
        if name == "scoring" and work.scoring_passes > 1:
            label += f" x {work.scoring_passes}"
        table.add_row(label, seconds_of(seconds, step.seconds), f"{seconds / phase_seconds:.0%}")
    table.add_section()
    # Asynchronous rollouts overlap the training, so that the step is shorter than the sum of its phases.
    note = f"rollouts {step.rollout:.0f} s beside training {step.training:.0f} s" if step.age else ""
    table.add_row("[bold]step[/bold]", f"[bold]{seconds_of(step.seconds)}[/bold]", note)
    return table


def seconds_of(part: float, step: float | None = None) -> str:
    """Write the seconds of a step, or of a part of it. For steps below 10 s they have three decimals."""
    whole = step or part
    if whole < 10:
        return f"{part:.3f}"
    return f"{part:.1f}" if step else f"{part:.0f}"


def sentences(forecast: Forecast, price: float | None) -> list[str]:
    """Describe lengths, throughput, the run, the bottleneck, and the numbers' uncertainty."""
    step = forecast.step
    work = forecast.work
    error = forecast.error
    lines = [
        f"responses per step: {work.num_samples}, on average {work.lengths.mean:.0f} tokens long "
        f"({work.lengths.source})"
    ]
    drafts = forecast.setup.draft_tokens
    if drafts:
        tokens_per_pass = kept_tokens(drafts, work.acceptance)
        accepted = f"accepted with {work.acceptance:.0%}: {tokens_per_pass:.1f} tokens per pass"
        lines.append(f"drafts: {drafts} per pass, {accepted}")
    lines.append(
        f"throughput: {step.tokens_per_second_per_gpu:.0f} tokens/s/GPU, MFU of the update {step.mfu:.0%}"
    )
    lines.append(_run(forecast, price))
    lines.append(f"bottleneck: {forecast.bottleneck}")
    low, high = map(seconds_of, error.around(step.seconds))
    lines.append(
        f"uncertainty: with these lengths {low} to {high} s per step; such intervals hold "
        f"{error.covered:.0%} of {error.num_steps} {error.what}, predicted with a median error of "
        f"{error.median:.0%}, {error.worst:.0%} at worst"
    )
    return lines


def _run(forecast: Forecast, price: float | None) -> str:
    """Describe the whole run. If the size of NeMo-RL's own data decides its end, describe 100 steps."""
    work = forecast.work
    if not work.or_passes:
        takes = f"{_duration(forecast.run_seconds)}, {cost(forecast, price)} GPU-hours"
        return f"run: {work.num_steps} steps, validations and checkpoints take {takes}"
    part = forecast.of_steps(min(work.num_steps, 100))
    takes = f"{_duration(part.run_seconds)}, {cost(part, price)} GPU-hours"
    return (
        f"run: {work.num_steps} steps{work.or_passes}, whichever ends first; every {part.work.num_steps} "
        f"steps, with their validations and checkpoints, take {takes}"
    )


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"


def cost(forecast: Forecast, price: float | None) -> str:
    """Write a run's GPU-hours as ``"1,234"``, or with a price as ``"1,234 ($3,085)"``.

    For a run whose end is not known the result is ``"-"``.
    """
    if forecast.work.or_passes:
        return "-"
    gpu_hours = f"{forecast.gpu_hours:,.0f}"
    if price is None:
        return gpu_hours
    return f"{gpu_hours} (${forecast.gpu_hours * price:,.0f})"


def best_table(base: Forecast, layouts: Sequence[Found]) -> Table:
    """List the fastest layouts."""
    title = f"fastest layouts that fit; the recipe's takes {base.step.seconds:.0f} s per step"
    table = _table(title, ("s/step", "gain", "tokens/s/GPU", "overrides"), ("overrides",))
    for layout in layouts:
        step = layout.forecast.step
        gain = base.step.seconds / step.seconds - 1
        overrides = " ".join(layout.overrides) or "as it is"
        throughput = f"{step.tokens_per_second_per_gpu:.0f}"
        table.add_row(f"{step.seconds:.0f}", f"{gain:+.0%}", throughput, overrides)
    return table


def scale_table(points: Sequence[Point], price: float | None) -> Table:
    """List numbers of GPUs, each with its best layout.

    Strong scaling keeps the batch; weak scaling enlarges it with the number of GPUs.
    """
    numbers = ("GPUs", "own layout", "strong s/step", "efficiency", "GPU-hours", "weak s/step", "efficiency")
    texts = ("best layout, strong", "")
    table = _table("other numbers of GPUs, each with its best layout", (*numbers, *texts), texts)
    for point in points:
        if point.strong is None or point.weak is None:
            num_dashes = len(numbers) + len(texts) - 2
            table.add_row(str(point.num_gpus), *["-"] * num_dashes, point.note)
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
    words = [f"TP{layout.tensor}"]
    for name, size in (("PP", layout.pipeline), ("CP", layout.context), ("EP", layout.expert)):
        if size > 1:
            words.append(f"{name}{size}")
    return " ".join(words)


def layout_text(setup: PlanInput) -> str:
    """Write a layout as ``"TP4 PP2 CP2, vLLM TP8, recomputed, 16 GPUs only sample"``."""
    parts = [_sizes(setup), f"vLLM TP{setup.vllm_tensor}"]
    if setup.recompute:
        parts.append("recomputed")
    if setup.num_rollout_gpus:
        parts.append(f"{setup.num_rollout_gpus} GPUs only sample")
    return ", ".join(parts)
