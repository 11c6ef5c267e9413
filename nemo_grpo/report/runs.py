"""Reads runs from their folders, and groups those that differ only in their seed."""

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml

from nemo_grpo.recipe.recipe import RECIPE_FILE
from nemo_grpo.recipe.sections import metric_key
from nemo_grpo.support.dotted import leaves
from nemo_grpo.support.errors import UserError, shown

log = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
DIAGNOSTICS_FILE = "diagnostics.jsonl"

NOT_A_SETTING = (
    "grpo.seed",
    "nemo_grpo.run_name",
    "nemo_grpo.runs_dir",
    "checkpointing.checkpoint_dir",
    "logger.log_dir",
)
"""Keys in which the runs of one group may differ."""

ENGINES = {"embedded": "embedded", "cluster": "NeMo-RL"}
"""nemo_grpo.target -> the engine's name in a label."""

ENTROPY = ("entropy/mean", "entropy/sampled")
"""Metrics of the policy's entropy: exact, and the mean of -log p over sampled tokens, which NeMo-RL's runs
have too. That estimate is noisier, with the same mean at temperature 1 without top-k or top-p."""

ACCURACY = "validation/accuracy"
HELD_OUT = {ACCURACY: "accuracy {:.3f}", "validation/val_loss": "held-out loss {:.3f}"}
"""Metric of a validation -> its text in the log."""
SET_ACCURACY = "validation/(.+)/accuracy"
"""Pattern of the accuracy of one validation set among several."""

Points = dict[int, float]
"""Step -> a metric's value."""


@dataclass(frozen=True)
class RunLog:
    """One run, finished or not.

    Attributes:
        path: folder of the run.
        rows: step -> metrics, in ascending order of steps.
        settings: dotted keys and values of the resolved recipe; empty if the folder has no recipe.
        diagnostics: objects of diagnostics.jsonl, in the order of steps; empty if there is no such file.
    """

    path: Path
    rows: dict[int, dict[str, Any]]
    settings: dict[str, Any] = field(default_factory=dict)
    diagnostics: tuple[dict[str, Any], ...] = ()

    @property
    def variant(self) -> str:
        """loss_fn.variant, or the folder's name for a run without a recipe."""
        return str(self.settings.get("loss_fn.variant", self.path.name))

    @property
    def engine(self) -> str:
        """Name of the engine that trained the run. A run without a recipe counts as embedded."""
        return ENGINES.get(str(self.settings.get("nemo_grpo.target")), ENGINES["embedded"])

    @property
    def seed(self) -> str:
        """grpo.seed, or ``?``."""
        return str(self.settings.get("grpo.seed", "?"))

    @property
    def names(self) -> set[str]:
        """Names of all metrics."""
        return {name for row in self.rows.values() for name in row}

    def points(self, key: str) -> Points:
        """Map steps to the metric's values, without steps that have no finite value."""
        return {step: float(row[key]) for step, row in self.rows.items() if _is_number(row.get(key))}


@dataclass(frozen=True)
class RunGroup:
    """Runs of one setting with different seeds.

    Attributes:
        label: distinguishes the group from the others.
        runs: runs of the group, at least one.
    """

    label: str
    runs: tuple[RunLog, ...]

    def curve(self, key: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return steps, mean over the runs, and sample standard deviation (0 for one run).

        Only steps that all runs with this metric have count.
        """
        curves = self._curves(key)
        if not curves:
            return np.array([]), np.array([]), np.array([])
        # Only common steps, because the mean would jump at the step where a shorter run ends.
        steps = sorted(set.intersection(*(set(points) for points in curves)))
        if not steps:
            return np.array([]), np.array([]), np.array([])
        values = np.array([[points[step] for step in steps] for points in curves])
        # The sample deviation (ddof=1) of a single run would be 0 / 0.
        spread = values.std(axis=0, ddof=1) if len(curves) > 1 else np.zeros(len(steps))
        return np.array(steps), values.mean(axis=0), spread

    def each(self, key: str, which: Literal["first", "last"]) -> list[float]:
        """Return the first or the last value of each run that has the metric."""
        return [values[0 if which == "first" else -1] for values in self.values(key)]

    def values(self, key: str) -> list[list[float]]:
        """Return the values of each run that has the metric, in the order of steps."""
        return [list(points.values()) for points in self._curves(key)]

    def gains(self, key: str) -> list[float]:
        """Return last minus first value of each run with at least two values."""
        return [values[-1] - values[0] for values in self.values(key) if len(values) > 1]

    def _curves(self, key: str) -> list[Points]:
        """Return the points of each run that has the metric."""
        curves = [run.points(key) for run in self.runs]
        return [points for points in curves if points]


def run_folders(path: str | Path) -> list[Path]:
    """List the folders of runs that a path means.

    A run's folder means itself. The folder of a comparison or sweep means its runs that have made a step.
    """
    folder = Path(path)
    if (folder / METRICS_FILE).is_file() or not (folder / "runs").is_dir():
        return [folder]
    return sorted(file.parent for file in folder.glob(f"runs/*/{METRICS_FILE}") if file.stat().st_size)


def read_run(path: str | Path) -> RunLog:
    """Read a run's folder.

    Lines that are not JSON are skipped; a killed run may leave one at the end. Rows of the same step are
    merged, and later values replace earlier ones. A resumed run may measure the diagnostics of a step again;
    the last ones count.
    """
    folder = Path(path)
    file = folder / METRICS_FILE
    if not file.is_file():
        raise UserError(
            f"{folder} holds no {METRICS_FILE}; give the folder of a run, such as runs/quickstart"
        )
    rows: dict[int, dict[str, Any]] = {}
    for row in json_lines(file):
        if isinstance(row.get("step"), int):
            rows.setdefault(row["step"], {}).update(row)
    if not rows:
        raise UserError(f"{file} holds no step yet; let the run make at least one")
    for row in rows.values():
        if _is_number(row.get("logprob/mean")):
            row["entropy/sampled"] = -row["logprob/mean"]
    rows = dict(sorted(rows.items()))
    settings = _settings(folder / RECIPE_FILE)
    return RunLog(folder, rows, settings, _diagnostics(folder / DIAGNOSTICS_FILE))


def _diagnostics(file: Path) -> tuple[dict[str, Any], ...]:
    """Read the measured steps, sorted. Of several lines for one step, the last one counts."""
    by_step = {}
    for measured in json_lines(file):
        if measured.keys() >= {"step", "num_tokens", "tokens"}:
            by_step[measured["step"]] = measured
    return tuple(by_step[step] for step in sorted(by_step))


def json_lines(file: Path) -> Iterable[dict[str, Any]]:
    """Yield the objects of a JSONL file, which may be missing. Lines that are not JSON are skipped."""
    if not file.is_file():
        return
    lines = file.read_text(errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            # There is no warning about the last line, which a running or killed run may leave incomplete.
            if line.strip() and number < len(lines):
                log.warning("%s line %d is not JSON and is skipped", file, number)
            continue
        if isinstance(row, dict):
            yield row


def _settings(file: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(file.read_text())
    except FileNotFoundError:
        log.warning("%s is missing; the run is labelled by its folder", file)
        return {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        log.warning("%s cannot be read (%s); the run is labelled by its folder", file, error)
        return {}
    return dict(leaves(tree)) if isinstance(tree, dict) else {}


def group_runs(runs: Sequence[RunLog]) -> list[RunGroup]:
    """Group runs whose settings differ only in the seed, in the order of first appearance.

    A group's label is its variant. If several groups share a variant, their labels also name the engine and
    the settings that differ.
    """
    runs_by_settings: dict[str, list[RunLog]] = {}
    for run in runs:
        same_settings = runs_by_settings.setdefault(_identity(run), [])
        for earlier in same_settings:
            # Counting a run twice would narrow the band without adding a sample.
            if earlier.seed == run.seed:
                raise UserError(
                    f"{earlier.path} and {run.path} have the same settings and grpo.seed={run.seed}; leave "
                    "one out"
                )
        same_settings.append(run)
    groups = list(runs_by_settings.values())
    return [RunGroup(_label(group, groups), tuple(group)) for group in groups]


def differing_settings(groups: Sequence[Sequence[RunLog]]) -> dict[str, list[Any]]:
    """Map the keys whose values differ between groups to the value of each group, or None if it has none."""
    group_settings = [group[0].settings for group in groups]
    keys = {key for settings in group_settings for key in settings}
    differing = {}
    for key in sorted(keys - set(NOT_A_SETTING)):
        values = [settings.get(key) for settings in group_settings]
        if any(value != values[0] for value in values):
            differing[key] = values
    return differing


@dataclass(frozen=True)
class Measure:
    """Metric by which a report judges runs.

    Attributes:
        key: name of the metric in metrics.jsonl; it is always a validation metric.
        higher_is_better: False for a loss.
    """

    key: str = ACCURACY
    higher_is_better: bool = True

    @property
    def name(self) -> str:
        """Name of the metric in a sentence, such as ``accuracy``."""
        return self.key.removeprefix("validation/")

    def best(self, values: Iterable[float]) -> float:
        """Choose the best of one or more values."""
        return max(values) if self.higher_is_better else min(values)

    def worst(self, values: Iterable[float]) -> float:
        """Choose the worst of one or more values."""
        return min(values) if self.higher_is_better else max(values)


def measure_of(groups: Sequence[RunGroup]) -> Measure:
    """Find the metric by which the runs' recipes rank checkpoints.

    It is the accuracy if the recipes rank by different metrics, or if the runs have no values of it.
    """
    measures = set()
    for group in groups:
        for run in group.runs:
            key = metric_key(run.settings.get("checkpointing.metric_name"))
            is_higher_better = run.settings.get("checkpointing.higher_is_better", True)
            measures.add((key, bool(is_higher_better)))
    if len(measures) != 1:
        return Measure()
    key, is_higher_better = measures.pop()
    # A training metric cannot judge runs, because every step measures it on other problems.
    if key is None or not key.startswith("validation/"):
        return Measure()
    has_values = any(group.each(key, "last") for group in groups)
    return Measure(key, is_higher_better) if has_values else Measure()


def common_key(groups: Sequence[RunGroup], keys: Sequence[str]) -> str:
    """Choose the first of ``keys`` that every group has, or else the first that any group has."""
    groups_with_key = {key: sum(len(group.curve(key)[0]) > 0 for group in groups) for key in keys}
    for key in keys:
        if groups_with_key[key] == len(groups):
            return key
    for key in keys:
        if groups_with_key[key] > 0:
            return key
    return keys[0]


def pass_key(groups: Sequence[RunGroup]) -> str:
    """Return the name ``validation/pass@k`` with the largest k of any run, or k = 8 if no run has one."""
    sample_counts = [int(match[1]) for match in matching(groups, r"validation/pass@(\d+)")]
    return f"validation/pass@{max(sample_counts, default=8)}"


def matching(groups: Sequence[RunGroup], pattern: str) -> list[re.Match[str]]:
    """Match a pattern with the full name of every metric of the runs; returns the matches sorted by name."""
    names = {name for group in groups for run in group.runs for name in run.names}
    matches = [re.fullmatch(pattern, name) for name in sorted(names)]
    return [match for match in matches if match]


def validation_note(row: Mapping[str, Any]) -> str:
    """Write the log line of a validation: its accuracy or loss. Several sets also have their accuracies."""
    phrases = [template.format(row[name]) for name, template in HELD_OUT.items() if name in row]
    for name, value in row.items():
        match = re.fullmatch(SET_ACCURACY, name)
        if match:
            phrases.append(f"{match[1]} {value:.3f}")
    return ", ".join(phrases)


def _identity(run: RunLog) -> str:
    """Return a text that is equal for all runs of one group. A run without a recipe is a group by itself."""
    settings = {key: value for key, value in run.settings.items() if key not in NOT_A_SETTING}
    return json.dumps(settings, sort_keys=True, default=str) if settings else str(run.path)


def _label(group: list[RunLog], groups: list[list[RunLog]]) -> str:
    """Write the shortest label that tells a group from the others."""
    label = group[0].variant
    same_label = [rival for rival in groups if rival[0].variant == label]
    if len({rival[0].engine for rival in same_label}) > 1:
        label = f"{label}, {group[0].engine}"
        same_label = [rival for rival in same_label if rival[0].engine == group[0].engine]
    if len(same_label) == 1:
        return label
    differing = differing_settings(same_label)
    # Otherwise the label is the folder's name: a legend has room for at most two settings, and runs without a
    # recipe differ in none.
    if not 1 <= len(differing) <= 2:
        return f"{label} ({group[0].path.name})"
    position = same_label.index(group)
    words = [f"{key.split('.')[-1]} {shown(values[position])}" for key, values in differing.items()]
    return f"{label} ({', '.join(words)})"


def _is_number(value: Any) -> bool:
    # In Python, True and False are ints, but they are not values of a metric.
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(np.isfinite(value))
