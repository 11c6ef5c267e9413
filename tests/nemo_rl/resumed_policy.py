"""NeMo-RL's policy saves after two steps and goes on; another resumes from there: ``FOLDER OUTPUT``.

A process in a rehearsal's environment. OUTPUT gets, of the third step of both: loss, gradient norm, learning
rate, weights.
"""

import os
import sys
from pathlib import Path

import torch
from nemo_rl.utils.checkpoint import CheckpointManager

from benchmarks.agreement.cluster import Engine, prepare
from benchmarks.agreement.recording import NUM_GENERATIONS, Case, batches
from nemo_grpo.nemorl.advantage import VariantEstimator
from nemo_grpo.nemorl.checkpoints import resume_with_optimizer
from nemo_grpo.nemorl.loss import ObjectiveLoss

SCHEDULE = (
    "policy.megatron_cfg.scheduler.lr_decay_style=cosine",
    "policy.megatron_cfg.scheduler.lr_decay_iters=4",
)


def main(folder, output):
    """Run both."""
    prepare()
    case = Case("grpo", "DP2", "bfloat16")
    recipe, step_2 = case.recipe(folder), folder / "checkpoints" / "step_2"
    steps, results = batches(folder), {}

    def third(engine, first):
        estimator = VariantEstimator(
            recipe.loss_fn, num_generations=NUM_GENERATIONS, seed=0, context=engine.context
        )
        for number in range(first, 3):
            if number == 2 and first == 0:
                weights = step_2 / "policy" / "weights"
                engine.policy.save_checkpoint(
                    weights_path=weights, optimizer_path=weights.with_name("optimizer")
                )
            found = engine.step(steps[number], estimator, ObjectiveLoss(recipe.loss_fn), 1)
        engine.close()
        return {
            "loss": found.losses,
            "grad_norm": found.grad_norm,
            "lr": found.metrics["lr"],
            "weights": found.weights,
        }

    results["unbroken"] = third(Engine(case, folder, SCHEDULE), 0)
    manager = CheckpointManager
    resume_with_optimizer(recipe)
    results["resumed"] = third(Engine(case, folder, SCHEDULE, manager.get_resume_paths(step_2)), 2)
    torch.save(results, output)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    os._exit(0)  # Ray ends with its cluster
