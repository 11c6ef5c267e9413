"""Published steps as the planner's rows: NeMo-RL's own tables in YAML, rows of any code base in CSV.

Both have the same keys. A cell of a CSV is YAML; an empty cell is a key that the source does not state.
``lacks`` names further reasons why a row cannot be predicted, and ``note`` an assumption.

The keys of `NEEDED` are required. Published seconds are `TIMES`. All other keys are optional:

    rollout_gpus, ahead             GPUs of the rollouts alone; steps that they run ahead
    tp cp ep pp, ends               parallel sizes; layers of the first and the last pipeline stage
    recompute, padded               full recomputation; sequences padded instead of packed
    lora, offload                   LoRA's dimension; share of Adam's state in the host's memory
    microbatch, score, passes       tokens of a microbatch; microbatches scored at once; scoring passes
    vllm, share, sequences, eager   vLLM's TP, its share of memory, its maximum sequences, without graphs
    fp8, bf16_attention             FP8 training and rollouts; attention in BF16 then
    draft_tokens, acceptance        tokens of the draft model, and their rate of acceptance
    segment                         nodes of a segment
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from nemo_grpo.plan.hardware import HARDWARE, Efficiency
from nemo_grpo.plan.inputs import PRESETS, PlanInput
from nemo_grpo.plan.lengths import of_mean
from nemo_grpo.plan.scenario import ACCEPTANCE, Scenario, Workload
from nemo_grpo.plan.step_time import ROLLOUT, UPDATE, StepTime, step_time
from nemo_grpo.recipe.layout import Layout

FOLDER = Path(__file__).parent / "published"
NEEDED = ("model", "gpu", "gpus", "prompts", "group", "batch", "limit", "prompt", "length")
"""Keys without which nothing is predicted."""
TIMES = ("step", "rollout", "scoring", "update", "refit")
"""Times that a row may publish, in seconds."""
_TEXTS = ("source", "model", "mode", "gpu", "lacks", "note")


@dataclass(frozen=True)
class Row:
    """One published step.

    Attributes:
        name: model, GPUs and mode, for a table.
        model: Hugging Face name, a key of `PRESETS`.
        gpu: a key of `HARDWARE`.
        source: the publication.
        setup: layout and settings of the run.
        work: responses of the step.
        tokens: published tokens per second and GPU; None if the source has none.
        published: seconds of the step and of phases, if the source has them.
        fits: names of the times that a fit may use.
        note: an assumption.
    """

    name: str
    model: str
    gpu: str
    source: str
    setup: PlanInput
    work: Workload
    tokens: float | None
    published: Mapping[str, float]
    fits: Sequence[str]
    note: str = ""

    def predict(self, eff: Efficiency) -> StepTime:
        """Predict the step with these constants."""
        return step_time(Scenario(PRESETS[self.model], self.setup, self.work, HARDWARE[self.gpu], eff))


def read_rows() -> list[Row]:
    """Read NeMo-RL's tables."""
    tree = yaml.safe_load((FOLDER / "nemo_rl.yaml").read_text())
    return [row_of({"prompt": tree["prompt"]} | tree["layouts"][row["layout"]] | row) for row in tree["rows"]]


def read_blind(file: Path) -> tuple[list[Row], list[tuple[dict[str, Any], str]]]:
    """Read the rows of a CSV that can be predicted, and (row, reasons) for the others."""
    rows: list[Row] = []
    lacking: list[tuple[dict[str, Any], str]] = []
    with file.open(newline="") as stream:
        for cells in csv.DictReader(stream):
            row: dict[str, Any] = {}
            for key, cell in cells.items():
                if cell:
                    row[key] = cell if key in _TEXTS else yaml.safe_load(cell)
            reasons = [key for key in NEEDED if key not in row]
            if "lacks" in row:
                reasons.append(row["lacks"])
            if reasons:
                lacking.append((row, ", ".join(reasons)))
            else:
                rows.append(row_of(row))
    return rows, lacking


def row_of(row: dict[str, Any]) -> Row:
    """Make a row from its keys."""
    _, model = row["model"].split("/")
    default_mode = f"{row['ahead']} ahead" if row.get("ahead") else "in turn"
    mode = row.get("mode", default_mode)
    precision = " FP8" if row.get("fp8") else ""
    published = {name: float(row[name]) for name in TIMES if name in row}
    return Row(
        name=f"{model} {row['gpus']} {mode}{precision}",
        model=row["model"],
        gpu=row["gpu"],
        source=row["source"],
        setup=_setup(row),
        work=Workload(
            num_samples=row["prompts"] * row["group"],
            group_size=row["group"],
            num_updates=row["prompts"] * row["group"] // row["batch"],
            lengths=of_mean(row["length"], row["limit"] - row["prompt"], row["prompt"]),
            scoring_passes=row.get("passes", 2),
            trajectory_age=row.get("ahead", 0),
            acceptance=row.get("acceptance", ACCEPTANCE),
        ),
        tokens=row.get("tokens"),
        published=published,
        fits=row.get("fits", list(published)),
        note=row.get("note", ""),
    )


def _setup(row: dict[str, Any]) -> PlanInput:
    """Read the layout and the settings of a row's run."""
    get = row.get
    limit = row["limit"]
    tp = get("tp", 1)
    fp8 = get("fp8", False)
    first, last = get("ends", [None, None])
    gpus_of_full_node = 4 if row["gpu"] == "gb200" else 8
    per_node = min(gpus_of_full_node, row["gpus"])
    return PlanInput(
        layout=Layout(tp, get("pp", 1), get("cp", 1), get("ep", 1), 1, tp > 1, first, last),
        num_nodes=row["gpus"] // per_node,
        gpus_per_node=per_node,
        num_rollout_gpus=get("rollout_gpus", 0),
        train_tokens=get("microbatch", limit),
        score_tokens=get("microbatch", limit) * get("score", 1),
        num_microbatches=1,
        max_length=limit,
        recompute=("full",) if get("recompute") else (),
        grad_bytes=2,
        optimizer="adam",
        distributed_optimizer=True,
        precision_aware=True,
        offload_fraction=float(get("offload", 0)),
        lora_dim=get("lora", 0),
        lora_modules=(),
        fp8_training=fp8,
        fp8_recipe="blockwise" if fp8 else "",
        logprob_chunk=0,
        vllm_tensor=get("vllm", 1),
        vllm_pipeline=1,
        vllm_fp8=fp8,
        vllm_cache_bytes=2,
        vllm_share=get("share", 0.6),
        has_rollouts=True,
        vllm_max_sequences=get("sequences", 1024),
        vllm_eager=get("eager", False),
        packed=not get("padded"),
        vllm_bf16_attention=get("bf16_attention", False),
        draft_tokens=get("draft_tokens", 0),
        draft_layers=1,
        segment_nodes=get("segment", 0),
    )


def predicted(step: StepTime) -> dict[str, float]:
    """Return seconds by the names of `TIMES`; only the step includes the swaps."""
    phases = step.phases
    return {
        "step": step.seconds,
        "rollout": sum(phases[name] for name in ROLLOUT),
        "update": sum(phases[name] for name in UPDATE),
        "scoring": phases["scoring"],
        "refit": phases["refit"],
    }


def error(row: Row, step: StepTime, what: str = "step") -> float:
    """Compute predicted / published - 1."""
    return predicted(step)[what] / row.published[what] - 1
