"""NeMo-RL's side: ``python -m benchmarks.agreement.cluster FOLDER OUTPUT`` in a rehearsal's environment.

Its own policy, worker group and workers do what its trainer does with a batch, with our estimator and loss.
"""

import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.agreement.recording import LAYOUTS, NUM_GENERATIONS, NUM_ROWS, Case, StepResult, batches
from nemo_grpo.nemorl import compat
from nemo_grpo.nemorl.advantage import VariantEstimator
from nemo_grpo.nemorl.config import load_run
from nemo_grpo.nemorl.host_api import ACTOR_PYTHONS, STOCK_WORKER
from nemo_grpo.nemorl.loss import STOCK_NAMES, ObjectiveLoss
from nemo_grpo.nemorl.policy import policy_factory
from nemo_grpo.nemorl.pretrained import load_tokenizer
from nemo_grpo.nemorl.step_context import StepContext
from nemo_grpo.nemorl.workarounds.tensor_pickles import keep_tensor_pickles_plain
from nemo_grpo.run.groups import Step

WORKER = "benchmarks.agreement.worker.ReturningPolicyWorker"
AVERAGED = ("lr", "wd", "global_valid_seqs", "global_valid_toks")
"""Metrics that every microbatch and rank reports whole; all other metrics are shares of a sum."""
NUMBERS = itertools.count()
"""Numbers of the virtual clusters, whose names must differ."""
OUR_NAMES = {stock_name: our_name for our_name, stock_name in STOCK_NAMES.items()}


def main(folder: Path, output: Path) -> None:
    """Run every case, with one policy for each layout and precision."""
    cases: list[Case] = torch.load(folder / "cases.pt", weights_only=False)
    prepare()
    results: dict[Case, list[StepResult]] = {}
    for _, group in itertools.groupby(cases, lambda case: (case.layout, case.precision)):
        cases_of_policy = list(group)
        engine = Engine(cases_of_policy[0], folder)
        for case in cases_of_policy:
            results[case] = engine.run(case)
            # After every case, so that an interrupted run keeps it.
            torch.save(results, output)
        engine.close()


def prepare() -> None:
    """Join the rehearsal's Ray; our worker runs where the stock worker does."""
    keep_tensor_pickles_plain()
    compat.import_name("nemo_rl.distributed.virtual_cluster:init_ray")()
    registry = compat.import_name(ACTOR_PYTHONS)
    registry[WORKER] = registry[STOCK_WORKER]


class Engine:
    """NeMo-RL's policy in one layout and precision."""

    def __init__(
        self,
        case: Case,
        folder: Path,
        overrides: Sequence[str] = (),
        paths: tuple[Path | None, Path | None] = (None, None),
    ) -> None:
        """Start the workers.

        Args:
            case: its layout and precision count.
            folder: holds the recipe.
            overrides: further overrides of the recipe.
            paths: weights and optimizer to resume from.
        """
        self.folder = folder
        self.context = StepContext()
        weights_path, optimizer_path = paths
        run = load_run(folder / "recipe.yaml", [*case.overrides(), *overrides])
        _, tokenizer = load_tokenizer(run)
        config = run.master_config.policy
        config["precision"] = case.precision
        config["megatron_cfg"]["pipeline_dtype"] = case.precision
        config["megatron_cfg"]["optimizer"]["bf16"] = case.precision == "bfloat16"
        config["megatron_cfg"]["train_iters"] = run.recipe.grpo.max_num_steps
        ranks = LAYOUTS[case.layout]["ranks"]
        self.cluster = compat.import_name("nemo_rl.distributed.virtual_cluster:RayVirtualCluster")(
            name=f"agree_{next(NUMBERS)}",
            bundle_ct_per_node_list=[ranks],
            use_gpus=True,
            num_gpus_per_node=ranks,
            max_colocated_worker_groups=1,
        )
        self.policy = policy_factory(run, self.context)(
            cluster=self.cluster,
            config=config,
            tokenizer=tokenizer,
            processor=None,
            weights_path=weights_path,
            optimizer_path=optimizer_path,
            init_optimizer=True,
            init_reference_model=True,
            worker_extension_cls_fqn=WORKER,
        )
        self.multiple = int(config["make_sequence_length_divisible_by"])
        self.policy.run_all_workers_single_data("keep_start")
        print(self.policy.run_all_workers_single_data("settings")[0], flush=True)

    def close(self) -> None:
        """End the workers."""
        self.policy.shutdown()
        self.cluster.shutdown()

    def run(self, case: Case) -> list[StepResult]:
        """Train a case's steps from the start."""
        recipe = case.recipe(self.folder)
        self.policy.run_all_workers_single_data("back_to_start")
        loss_fn = ObjectiveLoss(recipe.loss_fn)
        steps = batches(self.folder)
        estimator = VariantEstimator(
            recipe.loss_fn, num_generations=NUM_GENERATIONS, seed=recipe.grpo.seed, context=self.context
        )
        results = []
        for number, num_updates in enumerate(case.updates):
            # A case with more steps than recorded batches repeats them.
            step = steps[number % len(steps)]
            results.append(self.step(step, estimator, loss_fn, num_updates))
        return results

    def step(
        self, step: Step, estimator: VariantEstimator, loss_fn: ObjectiveLoss, num_updates: int
    ) -> StepResult:
        """Make the part of `grpo_train`'s step from the rollout to the update."""
        data = train_data(step, self.multiple)
        scored = data.__class__(
            {name: data[name] for name in ("input_ids", "input_lengths", "token_mask", "sample_mask")}
        )
        self.policy.prepare_for_lp_inference()
        data["prev_logprobs"] = self.policy.get_logprobs(scored)["logprobs"]
        entropies = self.context.entropies
        reference = None
        if loss_fn.reference_policy_kl_penalty > 0:
            reference = self.policy.get_reference_policy_logprobs(scored)["reference_logprobs"]
            data["reference_policy_logprobs"] = reference
        data["advantages"] = estimator.compute_advantage(
            prompt_ids=prompt_ids(step),
            rewards=step.rewards,
            mask=data["token_mask"] * data["sample_mask"][:, None],
            repeated_batch=repeated_batch(step),
            logprobs_policy=data["prev_logprobs"],
            logprobs_reference=reference,
        )
        token_weights = self.context.train_tensors.get("token_weights")
        self.policy.prepare_for_training()
        trained = self.policy.train(data, loss_fn, gbs=NUM_ROWS // num_updates)
        tensors = {
            "advantages": data["advantages"],
            "token_weights": token_weights,
            "logprobs": data["prev_logprobs"],
            "reference": reference,
            "entropies": entropies,
        }
        # NeMo-RL's columns are the tokens, padded on the right; the embedded engine's are predicted tokens.
        length = step.sequences.input_ids.shape[1]
        aligned = {
            name: tensor[:, 1:length].float() for name, tensor in tensors.items() if tensor is not None
        }
        return StepResult(
            tensors=aligned,
            # NeMo-RL divides each update's loss by the number of updates.
            losses=(trained["loss"].flatten() * num_updates).tolist(),
            grad_norm=float(trained["grad_norm"].flatten()[-1]),
            metrics={**estimator.last_metrics, **metrics_of_the_step(trained["all_mb_metrics"])},
            weights=self.policy.run_all_workers_single_data("hf_tensors")[0],
        )


def train_data(step: Step, multiple: int) -> Any:
    """Lay the step out for NeMo-RL: [B, S] with S a multiple of ``multiple``."""
    width = step.sequences.input_ids.shape[1]
    num_right = -width % multiple

    def padded(tokens: Tensor, num_left: int = 1) -> Tensor:
        return torch.nn.functional.pad(tokens, (num_left, num_right))

    return compat.import_name("nemo_rl.distributed.batched_data_dict:BatchedDataDict")(
        {
            "input_ids": padded(step.sequences.input_ids, num_left=0),
            "input_lengths": step.sequences.lengths,
            "generation_logprobs": padded(step.generation_logprobs),
            "token_mask": padded(step.token_mask.float()),
            "sample_mask": step.sample_mask.float(),
        }
    )


def prompt_ids(step: Step) -> Tensor:
    """Return the prompts' tokens [B, P], padded with 0."""
    sequences = step.sequences
    width = int(sequences.prompt_lengths.max())
    inside = torch.arange(width) < sequences.prompt_lengths[:, None]
    return torch.where(inside, sequences.input_ids[:, :width], 0)


def repeated_batch(step: Step) -> dict[str, Any]:
    """Make the conversations that the trainer passes to an estimator."""
    sequences = step.sequences
    rows = zip(
        sequences.input_ids, sequences.prompt_lengths.tolist(), sequences.lengths.tolist(), strict=True
    )
    conversations = []
    for ids, start, end in rows:
        prompt = {"role": "user", "token_ids": ids[:start]}
        response = {"role": "assistant", "token_ids": ids[start:end]}
        conversations.append([prompt, response])
    return {"message_log": conversations}


def metrics_of_the_step(shares: dict[str, list[float]]) -> dict[str, float]:
    """Add up the shares of microbatches and ranks like NeMo-RL's trainer; names are the embedded engine's."""
    metrics = {}
    for name, values in shares.items():
        # Extremes do not add up.
        if "_min" in name or "_max" in name:
            continue
        total = sum(values)
        metrics[OUR_NAMES.get(name, name)] = total / len(values) if name in AVERAGED else total
    return metrics


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    # Without the interpreter's clean-up, because the caller ends Ray with its cluster.
    os._exit(0)
