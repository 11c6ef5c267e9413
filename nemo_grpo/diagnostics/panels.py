"""Every picture of a report, read from `panels.yaml`."""

from pathlib import Path

import yaml

from nemo_grpo.diagnostics.plots import Draw, Panel, draw_percentiles, draw_training, draw_validation
from nemo_grpo.diagnostics.token_plots import draw_bins, draw_cumulative

DRAWN: dict[str, Draw] = {
    "training": draw_training,
    "validation": draw_validation,
    "percentiles": draw_percentiles,
    "cumulative": draw_cumulative,
    "bins": draw_bins,
}

PANELS = tuple(
    Panel(name, draw=DRAWN[entry.pop("draw", "training")], keys=tuple(entry.pop("keys")), **entry)
    for name, entry in yaml.safe_load(Path(__file__).with_name("panels.yaml").read_text()).items()
)
