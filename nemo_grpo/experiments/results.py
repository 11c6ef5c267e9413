"""Results of an experiment: report.html with its pictures, table.md, results.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_grpo.diagnostics.report import write_group_report
from nemo_grpo.diagnostics.runs import RunGroup, read_run
from nemo_grpo.diagnostics.summary import NOTE, markdown, records, stuck_runs
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


@dataclass(frozen=True)
class Results:
    """What an experiment has found so far.

    Attributes: groups: the finished runs by setting.  missing: unfinished runs and why.  num_jobs: all runs.
    """

    groups: Sequence[RunGroup]
    missing: Mapping[str, str]
    num_jobs: int

    def notes(self) -> str:
        """What stands below the table, in Markdown that reads as plain text."""
        text = f"{NOTE}\n" if self.groups else ""
        text += "".join(f"\nDoes not learn: {line}\n" for line in stuck_runs(self.groups))
        if self.missing:
            text += f"\nNot in the table, {len(self.missing)} of {self.num_jobs} runs:\n\n"
            text += "".join(f"- {name}: {reason}\n" for name, reason in self.missing.items())
        return text


def write_results(
    jobs: Sequence[Job],
    ended: Mapping[str, Status],
    out: Path,
    command: str,
    missing: Mapping[str, str] | None = None,
) -> Results:
    """Write the files; unfinished runs are named there and enter no mean.

    Args:    command: the command line that makes this, for the record.
             missing: why each unfinished run is; None: as ``ended`` says.
    """
    missing = _missing(jobs, ended) if missing is None else missing
    found = Results(finished_groups(jobs, ended), missing, len(jobs))
    if found.groups:
        write_group_report(found.groups, out / REPORT)
    table = f"{markdown(found.groups)}\n" if found.groups else ""
    (out / TABLE).write_text(f"```\n{command}\n```\n\n{table}{found.notes()}")
    results = {"command": command, "settings": records(found.groups), "missing": dict(missing)}
    (out / RESULTS).write_text(json.dumps(results, indent=2) + "\n")
    return found


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
