"""What `make smollm2` measured: held-out accuracy over both stages, mean and spread of the seeds.

    python benchmarks/smollm2.py [RUNS] [--png PICTURE]

RUNS holds smollm2-sft-sN, supervised, and smollm2-sN, which continues it by GRPO. Prints a table.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from nemo_grpo.diagnostics.plots import Panel, draw_panel, draw_validation
from nemo_grpo.diagnostics.runs import RunGroup, RunLog, read_run

SHOWN = ("accuracy", "greedy", "pass@4", "format")


def both_stages(first: Path) -> RunLog:
    """A seed's runs as one, the second's steps behind the first's."""
    supervised, reinforced = read_run(first), read_run(first.with_name(first.name.replace("-sft", "")))
    last = max(supervised.rows)
    later = {last + step: row for step, row in reinforced.rows.items() if step}
    return RunLog(first, supervised.rows | later, reinforced.settings)


def print_table(group: RunGroup) -> None:
    """One row per validation; spread: sample standard deviation of the seeds."""
    print(f"| step | {' | '.join(SHOWN)} | accuracy +- standard error, each seed |")
    print("|---" * (len(SHOWN) + 2) + "|")
    columns = {name: group.curve(f"validation/{name}") for name in SHOWN}
    for place, step in enumerate(columns["accuracy"][0]):
        means = (f"{mean[place]:.3f} +- {spread[place]:.3f}" for _, mean, spread in columns.values())
        rows = (run.rows[step] for run in group.runs)
        each = (f"{r['validation/accuracy']:.3f} +- {r['validation/accuracy_stderr']:.3f}" for r in rows)
        print(f"| {step} | {' | '.join(means)} | {', '.join(each)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="?", default=Path("runs"))
    parser.add_argument("--png", type=Path, help="also draw the curve")
    options = parser.parse_args()
    seeds = tuple(both_stages(folder) for folder in sorted(options.runs.glob("smollm2-sft-s*")))
    if not seeds:
        parser.error(f"{options.runs} holds no smollm2-sft-s*; run make smollm2")
    group = RunGroup("SmolLM2-135M-Instruct", seeds)
    print_table(group)
    if options.png:
        title = "SmolLM2-135M on word problems: 20 supervised steps, then GRPO"
        panel = Panel("accuracy", title, "held-out accuracy", ("validation/accuracy",), draw_validation, "")
        draw_panel(panel, [group], options.png)


if __name__ == "__main__":
    main()
