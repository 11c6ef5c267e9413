"""A cluster run's own batches through the embedded engine: how fast do two policies part on the same tokens?

    python benchmarks/replay_cluster_run.py RUN POLICY

NeMo-RL writes every batch that it trains on into its log folder. The embedded engine scores them and updates
a policy that starts from the same weights; in BF16, in BF16 with other microbatches, and in FP32. Two engines
that do the same part as fast as the embedded engine parts from itself when only its rounding changes.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_grpo.core.batch import TokenBatch
from nemo_grpo.engine import setup
from nemo_grpo.engine.megatron.policy import MegatronPolicy
from nemo_grpo.recipe import Recipe, load_recipe
from nemo_grpo.training.rollout import Sequences

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "cluster-quickstart-embedded.yaml"
BF16 = "policy.precision=bfloat16"
SETTINGS = {
    "BF16": [BF16],
    **{f"BF16, {n} a microbatch": [BF16, f"policy.train_micro_batch_size={n}"] for n in (2, 4, 8, 16, 64)},
    "FP32": ["policy.precision=float32"],
}
"""The recipe has 32 sequences a microbatch, in which the order of sums differs, and nothing else."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of the cluster run")
    parser.add_argument("policy", help="folder of the policy that it began with")
    parser.add_argument("--steps", type=int, default=50)
    given = parser.parse_args()
    torch.set_num_threads(1)
    tape = batches(given.run)[: given.steps]
    scores = {"NeMo-RL": [column(rows, "prev_logprobs")[:, 1:][mask_of(rows)] for rows in tape]}
    norms = {"NeMo-RL": theirs(given.run)}
    for name, overrides in SETTINGS.items():
        recipe = load_recipe(RECIPE, [*overrides, f"policy.model_name={given.policy}"])
        policy = setup.build_policy(recipe, Path(given.policy), keep_reference=False)
        results = [update(policy, recipe, rows, step) for step, rows in enumerate(tape)]
        scores[name], norms[name] = ([result[i] for result in results] for i in (0, 1))
    print(table(scores, norms))


def table(scores: dict[str, list[Tensor]], norms: dict[str, list[float]]) -> str:
    """Mean |difference of log p| to the embedded engine's BF16, and gradient norms, by step."""
    splits = list(SETTINGS)[1:-1]
    lines = ["| step | NeMo-RL | other microbatches: least, greatest | FP32 | norm: NeMo-RL | BF16 | FP32 |"]
    lines.append("|---" * 7 + "|")
    for step, ours in enumerate(scores["BF16"]):
        apart = {name: (values[step] - ours).abs().mean().item() for name, values in scores.items()}
        ends = min(apart[name] for name in splits), max(apart[name] for name in splits)
        differences = f"{apart['NeMo-RL']:.5f} | {ends[0]:.5f}, {ends[1]:.5f} | {apart['FP32']:.5f}"
        sizes = " | ".join(f"{norms[name][step]:.4f}" for name in ("NeMo-RL", "BF16", "FP32"))
        lines.append(f"| {step + 1} | {differences} | {sizes} |")
    return "\n".join(lines)


def batches(run: Path) -> list[list[dict[str, Any]]]:
    """Rows of every train_data_stepN.jsonl, by step."""
    found = run.glob("logs/**/train_data_step*")
    files = {int(file.stem.removeprefix("train_data_step")): file for file in found}
    return [[json.loads(line) for line in files[step].open()] for step in sorted(files)]


def theirs(run: Path) -> list[float]:
    """NeMo-RL's gradient norms, by step."""
    rows = map(json.loads, (run / "metrics.jsonl").open())
    return [row["grad_norm"] for row in rows if "grad_norm" in row]


def column(rows: list[dict[str, Any]], name: str) -> Tensor:
    """A field of all rows, [B, ...]."""
    return torch.stack([torch.tensor(row[name]).squeeze() for row in rows])


def mask_of(rows: list[dict[str, Any]]) -> Tensor:
    """[B, T - 1]: tokens of responses."""
    return column(rows, "token_loss_mask")[:, 1:].bool()


def update(
    policy: MegatronPolicy, recipe: Recipe, rows: list[dict[str, Any]], step: int
) -> tuple[Tensor, float]:
    """One update; the scores of the response tokens before it, and the gradient's norm."""
    how: dict[str, Any] = {
        "micro_batch_size": recipe.policy.train_micro_batch_size, "temperature": 1.0, "mb_tokens": None
    }  # fmt: skip
    sequences = Sequences(column(rows, "token_ids"), column(rows, "input_lengths"))
    scores = policy.score(sequences, **how)
    mask = mask_of(rows)
    batch = TokenBatch(
        prev_logprobs=scores.logprobs,
        entropies=scores.entropies,
        generation_logprobs=column(rows, "generation_logprobs")[:, 1:],
        token_mask=mask,
        sample_mask=column(rows, "sample_loss_mask").bool(),
        rewarded=torch.ones(len(rows), dtype=torch.bool),
        rewards=column(rows, "rewards").float(),
        group_ids=torch.arange(len(rows)) // recipe.grpo.num_generations_per_prompt,
    )
    objective = recipe.loss_fn.build()
    prepared = objective.prepare(batch, seed=step)
    advantages = column(rows, "advantages")[:, 1:]
    assert torch.equal(prepared.advantages * mask, advantages * mask), "other advantages"
    return scores.logprobs[mask], policy.update(objective, prepared, sequences, **how).grad_norm


if __name__ == "__main__":
    main()
