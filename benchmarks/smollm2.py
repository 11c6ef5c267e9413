"""Held-out accuracy of `make smollm2` and `make cluster-smollm2` over both stages, by seed.

    python -m benchmarks.smollm2 [RUNS] [--png PICTURE]

RUNS holds smollm2-sft-sN, supervised, and smollm2-sN, which continues it by GRPO; for NeMo-RL the names start
with cluster-. Prints a table for each engine: mean and spread of the seeds.
"""

import argparse
from pathlib import Path

from nemo_grpo.report.plots import Panel, draw_panel, draw_validation
from nemo_grpo.report.runs import RunGroup, RunLog, read_run

METRICS = ("accuracy", "greedy", "pass@4", "format")
"""Validation metrics of the table."""
ENGINES = {"embedded": "smollm2-sft-s*", "NeMo-RL": "cluster-smollm2-sft-s*"}


def both_stages(first: Path) -> RunLog:
    """Join the two runs of a seed, so that the steps of GRPO follow the supervised ones."""
    supervised = read_run(first)
    reinforced = read_run(first.with_name(first.name.replace("-sft", "")))
    rows = {step: dict(row) for step, row in supervised.rows.items()}
    last_supervised_step = max(rows)
    for step, row in reinforced.rows.items():
        # Step 0 of GRPO validates the model of the last supervised step, and joins its row.
        rows.setdefault(last_supervised_step + step, {}).update(row)
    return RunLog(first, rows, reinforced.settings)


def print_table(group: RunGroup) -> None:
    """Print a row per validation, with the sample standard deviation over seeds."""
    curves = {name: group.curve(f"validation/{name}") for name in METRICS}
    columns = {}
    for name, (steps, mean, spread) in curves.items():
        # Not every engine measures every metric.
        if len(steps):
            columns[name] = (steps, mean, spread)
    print(f"\n| {group.label}: step | {' | '.join(columns)} | accuracy, each seed |")
    print("|---" * (len(columns) + 2) + "|")
    accuracy_steps, _, _ = columns["accuracy"]
    for index, step in enumerate(accuracy_steps):
        means = (f"{mean[index]:.3f} +- {spread[index]:.3f}" for _, mean, spread in columns.values())
        accuracies = (f"{run.rows[step]['validation/accuracy']:.3f}" for run in group.runs)
        print(f"| {step} | {' | '.join(means)} | {', '.join(accuracies)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="?", default=Path("runs"))
    parser.add_argument("--png", type=Path, help="also draw the curve")
    options = parser.parse_args()
    groups = []
    for engine, pattern in ENGINES.items():
        first_runs = sorted(options.runs.glob(pattern))
        if first_runs:
            groups.append(RunGroup(engine, tuple(map(both_stages, first_runs))))
    if not groups:
        parser.error(f"{options.runs} holds no smollm2-sft-s*; run make smollm2")
    for group in groups:
        print_table(group)
    if options.png:
        title = "SmolLM2-135M on word problems: 20 supervised steps, then GRPO"
        panel = Panel("accuracy", title, "held-out accuracy", ("validation/accuracy",), "", draw_validation)
        draw_panel(panel, groups, options.png)


if __name__ == "__main__":
    main()
