"""One self-contained HTML file that shows a run or compares several."""

import base64
import html
from collections.abc import Sequence
from pathlib import Path

from nemo_grpo.diagnostics import summary, token_plots
from nemo_grpo.diagnostics.paired import FOREST, PAIRED_NOTE, Paired, draw_forest, paired_table, sentences
from nemo_grpo.diagnostics.panels import PANELS
from nemo_grpo.diagnostics.plots import draw_overview, draw_panel
from nemo_grpo.diagnostics.runs import RunGroup, differing_settings, group_runs, read_run, run_folders
from nemo_grpo.errors import UserError
from nemo_grpo.recipe.keys import shown

PLOTS = "plots"
REPORT = "report.html"
TITLE_LENGTH = 60
"""Letters of a title on one line."""


def plot_run(run_dir: str | Path) -> Path:
    """Write ``plots/*.png`` and ``report.html`` into a run's folder.

    Returns: the report's path.
    Raises:  UserError: the folder has no metrics.jsonl, or no step in it.
    """
    return write_report([run_dir], Path(run_dir) / REPORT)


def write_report(run_dirs: Sequence[str | Path], output: str | Path) -> Path:
    """Compare runs: one HTML file, and its pictures as PNG files in ``plots/`` beside it.

    Runs that differ only in their seed become one line with a band. The folder of a comparison or a sweep
    stands for its runs.

    Returns: ``output``.
    Raises:  UserError: no run is given, a folder is not a run's, two runs are alike, or the output cannot be
                 written or is another file.
    """
    folders = [folder for given in run_dirs for folder in run_folders(given)]
    if not folders:
        raise UserError("no run to report on; give the folder of at least one run that made a step")
    named = dict[Path, Path]()
    for folder in folders:
        named.setdefault(folder.resolve(), folder)  # a folder has several names
    return write_group_report(group_runs([read_run(folder) for folder in named.values()]), output)


def write_group_report(
    groups: Sequence[RunGroup], output: str | Path, paired: Sequence[Paired] = (), baseline: str = ""
) -> Path:
    """As `write_report`, for labelled groups; ``paired``: the others against the group ``baseline``."""
    output = Path(output)
    try:
        if output.is_file() and not _is_report(output):
            raise UserError(f"{output} exists and is not a report; remove it, or choose another -o")
        draw(groups, output.parent / PLOTS)
        if paired:
            draw_forest(paired, baseline, output.parent / PLOTS / FOREST)
        output.write_text(render(groups, output.parent / PLOTS, paired, baseline))
    except OSError as error:
        raise UserError(f"{output} cannot be written ({error.strerror}); choose another -o") from None
    return output


def _is_report(file: Path) -> bool:
    """True for an output of `render` and for an empty file."""
    head = _PAGE.partition("{title}")[0].encode()
    with file.open("rb") as opened:
        return opened.read(len(head)) in (head, b"")


def draw(groups: Sequence[RunGroup], folder: Path) -> None:
    """Write every panel that has data, and all of them in ``overview.png``; remove outdated pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    filled = [panel for panel in PANELS if panel.is_filled(groups)]
    for panel in PANELS:
        path = folder / f"{panel.name}.png"
        if panel in filled:
            draw_panel(panel, groups, path)
        else:
            path.unlink(missing_ok=True)
    draw_overview(filled, groups, folder / "overview.png")


def render(groups: Sequence[RunGroup], plots: Path, paired: Sequence[Paired], baseline: str) -> str:
    """The HTML text with the pictures of ``plots`` embedded."""
    title = " vs ".join(group.label for group in groups)
    title = title if len(title) <= TITLE_LENGTH else f"{len(groups)} settings"
    pictures = [_picture(plots / f"{panel.name}.png", panel.title) for panel in PANELS]
    sections = [
        f"<h1>{html.escape(title)}</h1>",
        _sources(groups),
        summary_table(groups),
        _findings(groups),
        _paired(paired, baseline, plots),
        f"<div class=panels>{''.join(pictures)}</div>",
        _token_tables(groups),
        _explanations(groups),
        _settings(groups),
    ]
    body = "\n".join(section for section in sections if section)
    return _PAGE.format(title=html.escape(title), style=_STYLE, body=body)


def _sources(groups: Sequence[RunGroup]) -> str:
    """The folder of one run; of several their number, and their folders once that is opened."""
    paths = [html.escape(str(run.path)) for group in groups for run in group.runs]
    if len(paths) == 1:
        return f"<p class=sub>{paths[0]}</p>"
    return f"<details class=sub><summary>{len(paths)} runs</summary>{'<br>'.join(paths)}</details>"


def summary_table(groups: Sequence[RunGroup]) -> str:
    """Accuracies, greedy, pass@k, entropy and time of each group over its seeds."""
    note = _escaped(summary.note(groups))
    return f"<div class=summary>{_table(*summary.table(groups))}</div><p class=note>{note}</p>"


def _paired(paired: Sequence[Paired], baseline: str, plots: Path) -> str:
    """Every setting's difference to the baseline: picture, table and verdicts."""
    if not paired:
        return ""
    verdicts = "".join(f"<li>{_escaped(line)}</li>" for line in sentences(paired, baseline))
    forest = _picture(plots / FOREST, "Difference in held-out accuracy, with 95 % intervals")
    table = _table(*paired_table(paired, baseline))
    notes = f"<ul>{verdicts}</ul><p class=note>{_escaped(PAIRED_NOTE)}</p>"
    return f"<h2>Against {html.escape(baseline)}, seed by seed</h2>{forest}{table}{notes}"


def _findings(groups: Sequence[RunGroup]) -> str:
    """Show why runs do not learn."""
    items = "".join(f"<li>{_escaped(line)}</li>" for line in summary.stuck_runs(groups))
    return f"<h2>Does not learn</h2><ul class=stuck>{items}</ul>" if items else ""


def _picture(path: Path, alternative: str) -> str:
    if not path.is_file():
        return ""
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{alternative}" src="data:image/png;base64,{data}">'


def _token_tables(groups: Sequence[RunGroup]) -> str:
    """Spread of the gradient norm, CW-GRPO's Table 1, and the tokens that stand out."""
    text = ""
    head, rows = token_plots.gradient_rows(groups)
    if rows:
        text += f"<h2>Gradient norm over the run</h2>{_table(head, rows)}"
        text += "<p class=note>Mean over seeds. A spike is a step above three medians of its run.</p>"
    head, rows = token_plots.covariance_rows(groups)
    if rows:
        text += f"<h2>Covariance that a share of the tokens reaches</h2>{_table(head, rows)}"
        text += (
            "<p class=note>Of the tokens with positive and with negative covariance, the most extreme share "
            "reaches this value; mean over measured steps and seeds.</p>"
        )
    lists = [(title, *token_plots.token_rows(groups, name)) for name, title in _TOKEN_LISTS.items()]
    folded = [
        f"<details><summary>{title}</summary>{_table(head, rows)}</details>"
        for title, head, rows in lists
        if rows
    ]
    if folded:
        text += f"<h2>Tokens that stand out</h2>{''.join(folded)}"
        text += "<p class=note>Tokens that occur at least five times; share: of the sum over all tokens.</p>"
    return text


def _explanations(groups: Sequence[RunGroup]) -> str:
    items = [
        f"<dt>{html.escape(panel.title)}</dt><dd>{html.escape(panel.explanation)}</dd>"
        for panel in PANELS
        if panel.is_filled(groups)
    ]
    note = "Lines of training metrics are running means; pale lines are single steps"
    several = any(len(group.runs) > 1 for group in groups)
    note += ", bands are one standard deviation over seeds." if several else "."
    return f"<h2>How to read it</h2><p>{note}</p><dl>{''.join(items)}</dl>"


def _settings(groups: Sequence[RunGroup]) -> str:
    """Settings that differ between groups; for a single group the whole recipe."""
    if len(groups) == 1:
        rows = [[key, shown(value)] for key, value in groups[0].runs[0].settings.items()]
        table = _table(["key", "value"], rows)
        return f"<h2>Recipe</h2><details><summary>{len(rows)} keys</summary>{table}</details>" if rows else ""
    differing = differing_settings([group.runs for group in groups])
    rows = [[key, *("" if v is None else shown(v) for v in values)] for key, values in differing.items()]
    head = ["key", *(group.label for group in groups)]
    return f"<h2>Settings that differ</h2>{_table(head, rows)}" if rows else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{_escaped(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f"<div class=scroll><table><thead>{line(head, 'th')}</thead><tbody>{body}</tbody></table></div>"


def _escaped(text: str) -> str:
    return html.escape(text).replace("+- ", "&plusmn;&nbsp;")


_TOKEN_LISTS = {
    "likely": "largest mean probability",
    "unlikely": "smallest mean probability",
    "covariance": "largest share of the covariance",
    "gradient": "largest share of the gradient",
}

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 1400px;
  margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem; margin: 0 } h2 { font-size: 1.1rem; margin-top: 2rem }
h1, .sub { overflow-wrap: anywhere }
.sub, .note { color: #666; margin: .3rem 0 1rem; font-size: .9rem }
.scroll { overflow-x: auto }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 350px), 1fr));
  gap: 1.5rem 1rem; margin: 1.5rem 0 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem }
th, td { padding: .35rem .8rem; text-align: right; border-bottom: 1px solid #e4e4e4; white-space: nowrap }
th:first-child, td:first-child { text-align: left } thead th { border-bottom: 2px solid #bbb }
.summary th, .summary td { white-space: normal; padding: .35rem .45rem; vertical-align: bottom }
tbody tr:hover { background: #f6f8fa }
.stuck { color: #a40000 }
img { width: 100%; max-width: 560px; display: block }
dt { font-weight: 600; margin-top: .5rem } dd { margin: 0 }
"""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>{style}</style></head>
<body>
{body}
</body></html>
"""
