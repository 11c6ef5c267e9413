"""Inputs of both engines (a small model, recorded responses, recipes) and their results."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from nemo_grpo.engine import setup
from nemo_grpo.engine.checks import choose_device
from nemo_grpo.engine.rollout import sample_groups
from nemo_grpo.recipe import Recipe, load_recipe
from nemo_grpo.rehearsal import stages
from nemo_grpo.rehearsal.environment import Stack
from nemo_grpo.run.groups import Step, assemble
from nemo_grpo.sampling.requests import Request
from nemo_grpo.support.hf_folder import end_tokens, load_config, load_tokenizer, load_weights
from nemo_grpo.tasks.prompts import encode_prompts
from nemo_grpo.tasks.scoring import Scorer

ROOT = Path(__file__).parents[2]
NUM_PROMPTS = 4
NUM_GENERATIONS = 4
NUM_BATCHES = 3
NUM_ROWS = NUM_PROMPTS * NUM_GENERATIONS
RECIPE = {
    "defaults": str(ROOT / "recipes" / "base" / "cluster.yaml"),
    "grpo": {
        "num_prompts_per_step": NUM_PROMPTS,
        "num_generations_per_prompt": NUM_GENERATIONS,
        "max_num_steps": 3,
        "val_at_start": False,
        "val_at_end": False,
        "val_period": 0,
    },
    "loss_fn": {"variant": "grpo", "reference_policy_kl_penalty": 0.05},
    "policy": {
        "model_name": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
        "max_total_sequence_length": 256,
        "megatron_cfg": {
            "optimizer": {"weight_decay": 0.01},
            # NeMo-RL 0.7.0's base adds up a BF16 model's gradients in BF16, the embedded engine in FP32.
            "distributed_data_parallel_config": {"grad_reduce_in_fp32": True},
        },
        "generation": {"max_new_tokens": 64},
    },
    "checkpointing": {"metric_name": None},
    "cluster": {"gpus_per_node": 1},
    "nemo_grpo": {"run_name": "agree", "task": {"name": "knights_knaves"}},
}
"""Cluster recipe that a rehearsal shrinks to two layers."""

LEARNING_RATE = 2e-4
KL = {"reference_policy_kl_penalty": 0.05}
VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": {"variant": "grpo", **KL},
    "dr_grpo": {"variant": "dr_grpo"},
    "dapo": {"variant": "dapo"},
    "clip_cov": {"variant": "clip_cov", "covariance_min": 0.01, "clip_fraction": 0.02},
    "cw_grpo": {"variant": "cw_grpo", **KL},
    "tr_grpo": {"variant": "tr_grpo", **KL},
    "erpo": {"variant": "erpo", **KL},
    "gpg": {"variant": "gpg"},
    "gspo": {"variant": "gspo"},
    "cispo": {"variant": "cispo"},
    "maxrl": {"variant": "maxrl"},
    "dppo": {"variant": "dppo"},
    "sapo": {"variant": "sapo"},
    "grpo_tis": {
        "variant": "grpo",
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": "tis",
        "truncated_importance_sampling_ratio": 2.0,
        **KL,
        "kl_score_function_gradient": True,
    },
    "tr_grpo_random": {"variant": "tr_grpo", "weighting": "random", **KL},
}
"""Name in the table -> ``loss_fn``, with KL penalties large enough to show."""

LAYOUTS = {
    "TP1": {"tensor_model_parallel_size": 1, "ranks": 1},
    "TP2": {"tensor_model_parallel_size": 2, "ranks": 2},
    "DP2": {"tensor_model_parallel_size": 1, "ranks": 2},
}
UPDATES = (1, 2, 2)
"""Updates of each step. The later steps are off-policy, and their policy differs from the reference."""


@dataclass(frozen=True)
class Case:
    """One run of a few steps on one engine.

    Attributes:
        variant: key of `VARIANTS`.
        layout: key of `LAYOUTS`.
        precision: "float32" or "bfloat16".
        updates: number of updates of each step.
    """

    variant: str
    layout: str
    precision: str
    updates: tuple[int, ...] = UPDATES

    def recipe(self, folder: Path, num_updates: int = 1) -> Recipe:
        """Load the recipe of a step with this number of updates."""
        recipe = load_recipe(folder / "recipe.yaml", self.overrides(num_updates))
        # Set past the checks, because a cluster recipe refuses FP32.
        policy = recipe.policy.model_copy(update={"precision": self.precision})
        return recipe.model_copy(update={"policy": policy})

    def overrides(self, num_updates: int = 1) -> list[str]:
        """List the recipe's overrides, without the precision."""
        layout = LAYOUTS[self.layout]
        loss_fn = yaml.safe_dump(VARIANTS[self.variant], default_flow_style=True, width=1000)
        return [
            f"loss_fn={loss_fn.strip()}",
            f"policy.megatron_cfg.tensor_model_parallel_size={layout['tensor_model_parallel_size']}",
            f"cluster.gpus_per_node={layout['ranks']}",
            f"policy.megatron_cfg.optimizer.lr={LEARNING_RATE}",
            f"policy.train_global_batch_size={NUM_ROWS // num_updates}",
        ]


@dataclass
class StepResult:
    """Results of a step.

    Attributes:
        tensors: name -> [B, S - 1], aligned as in `TokenBatch`.
        losses: loss of each update.
        grad_norm: norm of the last update's gradient before clipping.
        metrics: means over the step's updates.
        weights: the weights after the step.
        start: the weights before the first step; only in the first step's result.
    """

    tensors: dict[str, Tensor]
    losses: list[float]
    grad_norm: float
    metrics: dict[str, float]
    weights: dict[str, Tensor]
    start: dict[str, Tensor] = field(default_factory=dict)


def record(stack: Stack, folder: Path) -> None:
    """Make the model, sample responses with the embedded engine's decoder, and write both into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "source.yaml"
    source.write_text(yaml.safe_dump(RECIPE))
    rehearsal = stages.prepare(source, [], stack, folder / "rehearsal", 1)
    (folder / "recipe.yaml").write_text(rehearsal.recipe_file.read_text())
    torch.save(sample(rehearsal.small), folder / "batches.pt")


def sample(recipe: Recipe) -> list[Step]:
    """Sample the groups of each step."""
    model = Path(recipe.policy.model_name or "")
    tokenizer = load_tokenizer(model)
    task = recipe.nemo_grpo.task.build()
    sampling = setup.training_sampling(recipe, end_tokens(model, tokenizer))
    generator = setup.build_generator(recipe, load_config(model), choose_device(recipe))
    generator.update_weights(load_weights(model).items())
    steps = []
    for number in range(NUM_BATCHES):
        indices = range(NUM_PROMPTS * number, NUM_PROMPTS * (number + 1))
        problems = [task.train_problem(index, recipe.grpo.seed) for index in indices]
        prompts = encode_prompts(
            problems,
            tokenizer,
            recipe.nemo_grpo.prompt,
            limit=recipe.policy.max_total_sequence_length,
            max_new_tokens=sampling.max_new_tokens,
            vocab_size=load_config(model).vocab_size,
        )
        groups = sample_groups(
            generator,
            tokenizer,
            Scorer(task, recipe.nemo_grpo.rewards, recipe.nemo_grpo.prompt),
            problems,
            Request(prompts, NUM_GENERATIONS, sampling, number),
        )
        step = assemble(groups)
        steps.append(replace(step, sample_mask=~step.truncated))
    return steps


def batches(folder: Path) -> list[Step]:
    """Read the recorded steps."""
    steps: list[Step] = torch.load(folder / "batches.pt", weights_only=False)
    return steps
