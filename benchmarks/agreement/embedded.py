"""The embedded engine's side: ``python -m benchmarks.agreement.embedded FOLDER OUTPUT``, once per rank.

FOLDER/cases.pt lists the cases; all have one layout.
"""

import sys
from pathlib import Path

import torch

from benchmarks.agreement.recording import Case, StepResult, batches
from nemo_grpo.engine import setup
from nemo_grpo.engine.checks import choose_device
from nemo_grpo.engine.learning import Learner, TrainingState
from nemo_grpo.engine.megatron.policy import MegatronPolicy
from nemo_grpo.engine.step_metrics import Clock, mean_metrics
from nemo_grpo.support.distributed import is_rank_zero
from nemo_grpo.support.hf_folder import load_config


def main(folder: Path, output: Path) -> None:
    """Run every case; rank 0 writes the results."""
    torch.set_num_threads(1)
    cases: list[Case] = torch.load(folder / "cases.pt", weights_only=False)
    results = {case: run(case, folder) for case in cases}
    if is_rank_zero():
        torch.save(results, output)


def run(case: Case, folder: Path) -> list[StepResult]:
    """Train step by step, from recorded batches to updated weights, with the engine's own parts."""
    recipe = case.recipe(folder)
    model = Path(recipe.policy.model_name or "")
    device = choose_device(recipe)
    policy = setup.build_policy(recipe, model, load_config(model), device, keep_reference=True)
    start = hf_tensors(policy)
    objective = recipe.loss_fn.build()
    state = TrainingState()
    steps = batches(folder)
    results = []
    for number, num_updates in enumerate(case.updates):
        learner = Learner(case.recipe(folder, num_updates), objective, policy, state)
        prepared, updates = learner.learn(steps[number % len(steps)], Clock())
        batch = prepared.batch
        tensors = {
            "advantages": prepared.advantages,
            "token_weights": prepared.token_weights,
            "logprobs": batch.prev_logprobs,
            "reference": batch.reference_policy_logprobs,
            "entropies": batch.entropies,
            "mask": batch.mask,
        }

        metrics = {name: float(value) for name, value in prepared.metrics.items()}
        is_first_step = not results
        results.append(
            StepResult(
                tensors={
                    name: tensor.float().cpu() for name, tensor in tensors.items() if tensor is not None
                },
                losses=[update.metrics["loss/total"] for update in updates],
                grad_norm=updates[-1].grad_norm,
                metrics=metrics | mean_metrics(updates),
                weights=hf_tensors(policy),
                start=start if is_first_step else {},
            )
        )
    return results


def hf_tensors(policy: MegatronPolicy) -> dict[str, torch.Tensor]:
    """Copy the weights, by their Hugging Face names."""
    return {name: tensor.detach().float().cpu().clone() for name, tensor in policy.named_tensors()}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
