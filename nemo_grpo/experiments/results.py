"""Results of an experiment: report.html with its pictures, table.md, results.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from nemo_grpo.diagnostics.report import write_group_report
from nemo_grpo.diagnostics.runs import RunGroup, read_run
from nemo_grpo.diagnostics.summary import NOTE, markdown, records
from nemo_grpo.experiments.plan import Job
from nemo_grpo.experiments.runner import Status

REPORT, TABLE, RESULTS = "report.html", "table.md", "results.json"


def finished_groups(jobs: Sequence[Job], ended: Mapping[str, Status]) -> list[RunGroup]:
    """The finished runs of each setting, seeds in order; settings without any are left out."""
    members: dict[str, list[Job]] = {}
    for job in jobs:
        if job.name in ended and ended[job.name].state == "finished":
            members.setdefault(job.setting.label, []).append(job)
    order = dict.fromkeys(job.setting.label for job in jobs)
    return [
        RunGroup(label, tuple(read_run(job.folder) for job in sorted(members[label], key=lambda j: j.seed)))
        for label in order
        if label in members
    ]


def write_results(
    jobs: Sequence[Job],
    ended: Mapping[str, Status],
    out: Path,
    command: str,
    missing: Mapping[str, str] | None = None,
) -> str:
    """Write the files; unfinished runs are named there and enter no mean.

    Args:    command: the command line that makes this, for the record.
             missing: why each unfinished run is; None: as ``ended`` says.
    Returns: the text of table.md.
    """
    groups = finished_groups(jobs, ended)
    missing = _missing(jobs, ended) if missing is None else missing
    text = f"```\n{command}\n```\n\n"
    if groups:
        write_group_report(groups, out / REPORT)
        text += f"{markdown(groups)}\n{NOTE}\n"
    if missing:
        text += f"\nNot in the table, {len(missing)} of {len(jobs)} runs:\n\n"
        text += "".join(f"- {name}: {reason}\n" for name, reason in missing.items())
    (out / TABLE).write_text(text)
    results = {"command": command, "settings": records(groups), "missing": dict(missing)}
    (out / RESULTS).write_text(json.dumps(results, indent=2) + "\n")
    return text


def _missing(jobs: Sequence[Job], ended: Mapping[str, Status]) -> dict[str, str]:
    """Runs that are not finished, and why."""
    found = {}
    for job in jobs:
        status = ended.get(job.name)
        if status is None:
            found[job.name] = "not started"
        elif status.state != "finished":
            found[job.name] = f"{status.state} (exit code {status.exit_code}) {status.error}".rstrip()
    return found
