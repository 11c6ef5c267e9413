"""The report: one self-contained HTML file that shows a run or compares several."""

import base64
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from nemo_grpo.report import paired as pairs
from nemo_grpo.report import samples, summary, token_plots
from nemo_grpo.report.paired import FOREST, Paired, draw_forest
from nemo_grpo.report.plots import (
    Draw,
    Panel,
    draw_overview,
    draw_panel,
    draw_percentiles,
    draw_training,
    draw_validation,
)
from nemo_grpo.report.runs import RunGroup, differing_settings, group_runs, measure_of, read_run, run_folders
from nemo_grpo.support.errors import UserError, shown
from nemo_grpo.support.files import read_yaml

PLOTS = "plots"
REPORT = "report.html"
JUDGED = "judged"
"""Name of the panel of the metric that ranks checkpoints."""
TITLE_LENGTH = 60
"""Most letters of a title on one line."""
HEAD = b'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
"""First bytes of every report."""

DRAW_FUNCTIONS: dict[str, Draw] = {
    "training": draw_training,
    "validation": draw_validation,
    "percentiles": draw_percentiles,
    "cumulative": token_plots.draw_cumulative,
    "bins": token_plots.draw_bins,
}

NEXT_STEPS = {
    "Compare variants, three seeds each": "nemo-grpo compare RECIPE --variants grpo,gpg --seeds 3",
    "Train on problems of your own: copy a recipe, and name their files in its nemo_grpo.task": (
        "nemo-grpo recipe copy quickstart mine.yaml"
    ),
    "Train on a cluster: plan the memory and the time, then submit the job": (
        "nemo-grpo plan RECIPE, nemo-grpo launch RECIPE"
    ),
}
"""Sentence -> command, at a report's end."""


def _read_panels() -> tuple[Panel, ...]:
    entries = read_yaml(Path(__file__).with_name("panels.yaml"))
    panels = []
    for name, entry in entries.items():
        draw_function = DRAW_FUNCTIONS[entry.pop("draw", "training")]
        keys = tuple(entry.pop("keys", ()))
        panels.append(Panel(name, draw=draw_function, keys=keys, **entry))
    return tuple(panels)


PANELS = _read_panels()


def plot_run(run_dir: str | Path) -> Path:
    """Write ``plots/*.png`` and ``report.html`` into a run's folder; returns the report's path."""
    return write_report([run_dir], Path(run_dir) / REPORT)


def write_report(run_dirs: Sequence[str | Path], output: str | Path) -> Path:
    """Compare runs in one HTML file, with its plots as PNG files in ``plots/`` beside it.

    Runs that differ only in their seed become one line with a band. The folder of a comparison or a sweep
    means all of its runs.

    Returns:
        The path ``output``.
    """
    # A run may be named twice: by itself and by its comparison, or through a link. It is read once, under the
    # first name.
    folders = dict[Path, Path]()
    for run_dir in run_dirs:
        for folder in run_folders(run_dir):
            folders.setdefault(folder.resolve(), folder)
    if not folders:
        raise UserError("no run to report on; give the folder of at least one run that made a step")
    runs = [read_run(folder) for folder in folders.values()]
    return write_group_report(group_runs(runs), output)


def write_group_report(
    groups: Sequence[RunGroup], output: str | Path, paired: Sequence[Paired] = (), baseline: str = ""
) -> Path:
    """Write the report of labelled groups.

    Args:
        output: the HTML file; the plots go beside it.
        paired: differences of the other groups from the group ``baseline``.
    """
    output = Path(output)
    plots = output.parent / PLOTS
    try:
        if output.is_file() and not _is_report(output):
            raise UserError(f"{output} exists and is not a report; remove it, or choose another -o")
        draw(groups, plots)
        if paired:
            draw_forest(paired, baseline, plots / FOREST)
        output.write_text(render(groups, plots, paired, baseline))
    except OSError as error:
        raise UserError(f"{output} cannot be written ({error.strerror}); choose another -o") from None
    return output


def _is_report(file: Path) -> bool:
    """Return True for a file that may be replaced: a report, or an empty file."""
    with file.open("rb") as opened:
        return opened.read(len(HEAD)) in (HEAD, b"")


def draw(groups: Sequence[RunGroup], folder: Path) -> None:
    """Draw each panel that has data, and an ``overview.png`` of all of them. Remove outdated pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    filled = drawn_panels(groups)
    (folder / f"{JUDGED}.png").unlink(missing_ok=True)
    for panel in PANELS:
        pattern = f"{panel.name}-*.png" if panel.each else f"{panel.name}.png"
        for outdated in folder.glob(pattern):
            outdated.unlink()
    for panel in filled:
        draw_panel(panel, groups, folder / f"{panel.name}.png")
    draw_overview(filled, groups, folder / "overview.png")


def panels_of(groups: Sequence[RunGroup]) -> list[Panel]:
    """List all panels in order. Each reward component, and each of several validation sets, has its own.

    If no panel draws the metric that ranks checkpoints, an additional first panel does.
    """
    panels = [single for panel in PANELS for single in panel.of_each(groups)]
    measure = measure_of(groups)
    if any(measure.key in panel.keys for panel in panels):
        return panels
    explanation = "The recipe's checkpointing.metric_name, which ranks checkpoints."
    if not measure.higher_is_better:
        explanation += " Lower is better."
    judged = Panel(
        JUDGED, f"Held-out {measure.name}", "mean over held-out problems", (measure.key,), explanation
    )
    return [replace(judged, draw=draw_validation), *panels]


def drawn_panels(groups: Sequence[RunGroup]) -> list[Panel]:
    """List the panels that have values other than zeros."""
    panels = [panel for panel in panels_of(groups) if panel.is_filled(groups)]
    return [panel for panel in panels if not panel.is_always_zero(groups)]


def render(groups: Sequence[RunGroup], plots: Path, paired: Sequence[Paired], baseline: str) -> str:
    """Render the report's HTML with its plots embedded."""
    title = " vs ".join(group.label for group in groups)
    if len(title) > TITLE_LENGTH:
        title = f"{len(groups)} settings"
    environment = Environment(
        autoescape=True,
        loader=FileSystemLoader(Path(__file__).parent),
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {"base64": _as_base64, "deviation": _with_deviation_sign}
    return environment.get_template("report.html.j2").render(
        title=title,
        groups=groups,
        plots=plots,
        paired=paired,
        baseline=baseline,
        settings=_settings(groups),
        panels=drawn_panels(groups),
        zeros=[panel.title for panel in panels_of(groups) if panel.is_always_zero(groups)],
        next_steps=NEXT_STEPS,
        pairs=pairs,
        samples=samples,
        summary=summary,
        tokens=token_plots,
    )


def _settings(groups: Sequence[RunGroup]) -> list[list[str]]:
    """List the settings that differ between the groups, or the whole recipe of a single group."""
    if len(groups) == 1:
        return [[key, shown(value)] for key, value in groups[0].runs[0].settings.items()]
    rows = []
    for key, values in differing_settings([group.runs for group in groups]).items():
        cells = ["" if value is None else shown(value) for value in values]
        rows.append([key, *cells])
    return rows


def _as_base64(picture: Path) -> str:
    return base64.b64encode(picture.read_bytes()).decode()


def _with_deviation_sign(text: str) -> Markup:
    """Escape a text for HTML, and replace its ``+-`` by a plus-minus sign after which no line breaks."""
    return escape(text).replace("+- ", Markup("&plusmn;&nbsp;"))
