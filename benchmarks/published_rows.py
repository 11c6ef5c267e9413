"""Published steps as the planner's rows: NeMo-RL's own tables in YAML, rows of any code base in CSV.

Both have the same keys. A CSV's cell is YAML, an empty one a key that the source does not state; ``lacks``
names further reasons against a prediction, ``note`` an assumption.

`NEEDED` keys are required. Others: ``rollout_gpus`` of their own and steps ``ahead``; ``tp cp ep pp`` and the
layers of the pipeline's ``ends``; ``recompute`` (full), ``padded``, ``lora``, ``offload`` of Adam's state;
tokens of a ``microbatch``, and microbatches that ``score`` takes at once; scoring ``passes``; vLLM's TP as
``vllm``, its ``share`` of memory, ``sequences``, ``eager``; ``fp8``, ``bf16_attention``, ``draft_tokens`` and
their ``acceptance``; nodes of a ``segment``. Published seconds are `TIMES`.
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

    Attributes: published: seconds of the step and of phases, if the source has them.
                fits: names of times that a fit may use.
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
            row = {
                key: cell if key in _TEXTS else yaml.safe_load(cell) for key, cell in cells.items() if cell
            }
            lacks = [key for key in NEEDED if key not in row] + [row[key] for key in ("lacks",) if key in row]
            if lacks:
                lacking.append((row, ", ".join(lacks)))
            else:
                rows.append(row_of(row))
    return rows, lacking


def row_of(row: dict[str, Any]) -> Row:
    """Make a row from its keys."""
    ahead = f"{row['ahead']} ahead" if row.get("ahead") else "in turn"
    model, mode = row["model"].split("/")[1], row.get("mode", ahead)
    published = {name: float(row[name]) for name in TIMES if name in row}
    return Row(
        name=f"{model} {row['gpus']} {mode}{' FP8' if row.get('fp8') else ''}",
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
    get, limit = row.get, row["limit"]
    tp, fp8 = get("tp", 1), get("fp8", False)
    first, last = get("ends", [None, None])
    per_node = min(4 if row["gpu"] == "gb200" else 8, row["gpus"])
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
    """Return seconds by the names of `TIMES`; swaps are in none of them but the step."""
    p = step.phases
    return {
        "step": step.seconds,
        "rollout": sum(p[name] for name in ROLLOUT),
        "update": sum(p[name] for name in UPDATE),
        "scoring": p["scoring"],
        "refit": p["refit"],
    }


def error(row: Row, step: StepTime, what: str = "step") -> float:
    """Compute predicted / published - 1."""
    return predicted(step)[what] / row.published[what] - 1
