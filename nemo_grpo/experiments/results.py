"""Results of an experiment: report.html with its plots, table.md, results.json."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_grpo.experiments.jobs import Job, Status
from nemo_grpo.report.paired import (
    FOREST,
    PAIRED_NOTE,
    Paired,
    compare_groups,
    paired_records,
    paired_table,
    sentences,
)
from nemo_grpo.report.report import PLOTS, write_group_report
from nemo_grpo.report.runs import METRICS_FILE, NOT_A_SETTING, RunGroup, RunLog, json_lines, read_run
from nemo_grpo.report.summary import markdown, markdown_table, note, records, stuck_runs
from nemo_grpo.support.dotted import leaves
from nemo_grpo.support.errors import UserError, did_you_mean, shown

REPORT = "report.html"
TABLE = "table.md"
RESULTS = "results.json"


def steps_done(job: Job) -> int:
    """Return the last step in the run's metrics, or 0 if it has none."""
    steps = (row.get("step") for row in json_lines(job.folder / METRICS_FILE))
    return max((step for step in steps if isinstance(step, int)), default=0)


def is_complete(job: Job) -> bool:
    """Return True if the run's metrics contain its last step, or reach the goal that ends a run early."""
    last_step = steps_done(job)
    if last_step >= job.recipe.grpo.max_num_steps:
        return True
    # The model may reach the goal before its first step, but then the run has not trained.
    if last_step == 0:
        return False
    rows = json_lines(job.folder / METRICS_FILE)
    return any(job.recipe.grpo.is_goal(row) for row in rows)


def finished_groups(jobs: Sequence[Job], ended: Mapping[str, Status]) -> list[RunGroup]:
    """Group the finished runs by setting, ordered by seed. Settings without a finished run are left out."""
    runs_by_label: dict[str, list[RunLog]] = {job.setting.label: [] for job in jobs}
    for job in sorted(jobs, key=lambda job: job.seed):
        if _is_finished(job, ended):
            runs_by_label[job.setting.label].append(read_run(job.folder))
    return [RunGroup(label, tuple(runs)) for label, runs in runs_by_label.items() if runs]


def _is_finished(job: Job, ended: Mapping[str, Status]) -> bool:
    return job.name in ended and ended[job.name].state == "finished"


def settings_that_differ(jobs: Sequence[Job]) -> tuple[list[str], list[list[str]]]:
    """Tabulate the keys whose values differ between the settings' recipes, one row per key.

    A cell is empty if the setting's variant does not have this parameter.

    Returns:
        Head and rows for `report.summary.markdown_table`. There are no rows if nothing differs.
    """
    by_label = {job.setting.label: dict(leaves(job.recipe.to_dict())) for job in jobs}
    keys = sorted({key for settings in by_label.values() for key in settings} - set(NOT_A_SETTING))
    rows = []
    for key in keys:
        values = [shown(settings[key]) if key in settings else "" for settings in by_label.values()]
        if len(set(values)) > 1:
            rows.append([key, *values])
    return ["settings that differ", *by_label], rows


@dataclass(frozen=True)
class Results:
    """Results of an experiment so far.

    Attributes:
        groups: finished runs by setting.
        unfinished: name of an unfinished run -> reason.
        num_jobs: number of runs, finished or not.
        baseline: label of the setting that the others are compared with.
        paired: differences of every other setting from the baseline.
        files: files that were written, the report first.
    """

    groups: Sequence[RunGroup]
    unfinished: Mapping[str, str]
    num_jobs: int
    baseline: str
    paired: Sequence[Paired]
    files: Sequence[Path]

    def notes(self) -> str:
        """Write the notes below the tables, in Markdown that reads as plain text."""
        text = f"{note(self.groups)}\n" if self.groups else ""
        if self.paired:
            lines = "".join(f"- {line}\n" for line in sentences(self.paired, self.baseline))
            text += f"\n{PAIRED_NOTE}\n\n{lines}\nDrawn in {PLOTS}/{FOREST}.\n"
        text += "".join(f"\nDoes not learn: {line}\n" for line in stuck_runs(self.groups))
        if self.unfinished:
            text += f"\nNot in the table, {len(self.unfinished)} of {self.num_jobs} runs:\n\n"
            text += "".join(f"- {name}: {reason}\n" for name, reason in self.unfinished.items())
        return text


def write_results(
    jobs: Sequence[Job],
    ended: Mapping[str, Status],
    out: Path,
    command: str,
    unfinished: Mapping[str, str] | None = None,
    baseline: str | None = None,
) -> Results:
    """Write report, table and results.json from the finished runs. They also list the unfinished runs.

    Args:
        jobs: runs of all settings and seeds.
        ended: name of a job -> how its last process ended.
        out: folder of the experiment.
        command: this command line, which the files record.
        unfinished: name of an unfinished run -> reason; by default ``ended`` gives the reasons.
        baseline: see `baseline_of`.
    """
    if unfinished is None:
        names = [job.name for job in jobs if not _is_finished(job, ended)]
        unfinished = {name: str(ended.get(name, "not started")) for name in names}
    baseline = baseline_of(jobs, baseline)
    groups = finished_groups(jobs, ended)
    paired = compare_groups(groups, baseline)
    files = [out / TABLE, out / RESULTS]
    if groups:
        write_group_report(groups, out / REPORT, paired, baseline)
        files.insert(0, out / REPORT)
    else:
        # A report of an earlier command shows runs that no longer count, because they must be repeated.
        (out / REPORT).unlink(missing_ok=True)
    if not paired:
        (out / PLOTS / FOREST).unlink(missing_ok=True)
    results = Results(groups, unfinished, len(jobs), baseline, paired, files)
    (out / TABLE).write_text(_tables(results, jobs, command))
    record = {
        "command": command,
        "settings": records(groups),
        "paired": paired_records(paired, baseline),
        "missing": dict(unfinished),
    }
    (out / RESULTS).write_text(json.dumps(record, indent=2) + "\n")
    return results


def _tables(results: Results, jobs: Sequence[Job], command: str) -> str:
    """Return the text of table.md: the command, both tables, the notes, the settings that differ."""
    parts = [f"```\n{command}\n```\n\n"]
    if results.groups:
        parts.append(f"{markdown(results.groups)}\n")
    if results.paired:
        head, rows = paired_table(results.paired, results.baseline)
        parts.append(f"{markdown_table(head, rows)}\n")
    parts.append(results.notes())
    head, rows = settings_that_differ(jobs)
    if rows:
        parts.append(f"\n{markdown_table(head, rows)}")
    return "".join(parts)


def baseline_of(jobs: Sequence[Job], label: str | None = None) -> str:
    """Choose the setting that the others are compared with: ``label``, or else grpo, or else the first."""
    labels = [job.setting.label for job in jobs]
    if label is None:
        return "grpo" if "grpo" in labels else labels[0]
    if label not in labels:
        raise UserError(f"--baseline {label} is not one of the settings{did_you_mean(label, set(labels))}")
    return label
