"""Callbacks on NeMo-RL's logger and checkpoint manager, which record and check a run in the driver."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from numbers import Real
from pathlib import Path
from statistics import fmean
from typing import Any

from nemo_grpo.nemorl.compat import rebound
from nemo_grpo.recipe import Recipe
from nemo_grpo.recipe.sections import OVERLAP, VLLM
from nemo_grpo.report.runs import json_lines, validation_note
from nemo_grpo.report.stuck import SIGNAL, Watch
from nemo_grpo.run.continuation import data_files, keep_inputs
from nemo_grpo.run.folder import RunFolder, newest_checkpoint, step_of
from nemo_grpo.tasks.base import Problem, by_set, set_of
from nemo_grpo.tasks.scoring import over_sets, reward_metrics, validation_rewards

log = logging.getLogger(__name__)


class Callback:
    """Called by NeMo-RL's logger and checkpoint manager; a subclass overrides what it needs."""

    def added_metrics(self, metrics: Mapping[str, Any], step: int, prefix: str) -> Mapping[str, float]:
        """Return further metrics to log with these."""
        return {}

    def on_metrics(self, metrics: Mapping[str, Any], step: int, prefix: str) -> None:
        """Handle metrics that NeMo-RL has logged, including the added ones."""

    def on_checkpoint(self, folder: Path) -> None:
        """Put files into a checkpoint that NeMo-RL has started."""


@contextmanager
def calling_back(
    callbacks: Sequence[Callback], logger: Any = None, checkpointer: Any = None
) -> Iterator[None]:
    """Make NeMo-RL's logger and checkpoint manager call these callbacks, in order, within the block."""

    def log(theirs: Callable[..., Any]) -> Callable[..., Any]:
        def log_metrics(metrics: dict[str, Any], step: int, *rest: Any, **named: Any) -> Any:
            prefix = named.get("prefix", rest[0] if rest else "") or ""
            for callback in callbacks:  # NeMo-RL ranks checkpoints, and stops, by the same dictionary
                metrics.update(callback.added_metrics(metrics, step, prefix))
            done = theirs(metrics, step, *rest, **named)
            for callback in callbacks:
                callback.on_metrics(metrics, step, prefix)
            return done

        return log_metrics

    def begin(theirs: Callable[..., Any]) -> Callable[..., Any]:
        def init_tmp_checkpoint(*arguments: Any, **named: Any) -> Any:
            folder = theirs(*arguments, **named)
            for callback in callbacks:
                callback.on_checkpoint(Path(folder))
            return folder

        return init_tmp_checkpoint

    with ExitStack() as stack:
        if logger is not None:
            stack.enter_context(rebound("metrics", log, logger))
        if checkpointer is not None:
            stack.enter_context(rebound("checkpoint begun", begin, checkpointer))
        yield


OUR_NAMES = {
    "train/reward": "reward/mean",
    "train/filtered_reward": "kept/reward/mean",
    "train/loss": "loss/total",
    "train/grad_norm": "grad_norm",
    "train/lr": "lr",
    "train/mean_gen_tokens_per_sample": "length/mean",
    "train/gen_kl_error": "mismatch/kl",
    "timing/train/total_step_time": "time/step",  # with the validation and the checkpoint after the step
    "validation/avg_length": "validation/num_tokens",
}
"""NeMo-RL's metric -> the embedded engine's name for it. `train/approx_entropy` keeps its name: it is an
estimate from the sampled tokens, not the exact `entropy/mean`."""


def name_of(prefix: str, name: str) -> str:
    """Name a logged metric in metrics.jsonl; a variant's own names, which have a slash, stay."""
    if prefix == "train" and "/" in name:
        return name
    full = f"{prefix}/{name}" if prefix else name
    return OUR_NAMES.get(full, full)


@contextmanager
def alone(recipe: Recipe) -> Iterator[None]:
    """Lock the folders of a run within the block against other runs, on either engine.

    The locks end with the process that holds them, or with its node: a dead job stops no resume.
    """
    with ExitStack() as held:
        for path in (recipe.run_dir, *([recipe.checkpoint_dir] if recipe.checkpointing.enabled else [])):
            folder = held.enter_context(closing(RunFolder(path)))
            folder.path.mkdir(parents=True, exist_ok=True)
            folder.lock()
        yield


class RunRecord(Callback):
    """Passes what NeMo-RL logs to the run's folder, in the embedded engine's format.

    Its files are ``metrics.jsonl``, in which a step may have several rows, ``versions.json`` and
    ``recipe.resolved.yaml``.
    """

    def __init__(self, recipe: Recipe) -> None:
        # NeMo-RL's own environments have other weights, or none
        weights = None if recipe.nemo_grpo.task is None else recipe.nemo_grpo.rewards
        self.watch = Watch(recipe.grpo.max_num_steps, weights)
        newest = newest_checkpoint(recipe.checkpoint_dir)
        from_step = step_of(newest) if newest else -1
        checkpoints = recipe.checkpoint_dir if recipe.checkpointing.enabled else None
        # Not `open`: `alone` has held the locks since before NeMo-RL's set-up, and trackers are NeMo-RL's.
        self.run = RunFolder(recipe.run_dir, checkpoints=checkpoints)
        self.run.begin_record(recipe.to_yaml(), recipe.own_files, from_step)
        keep_inputs(self.run.path, data_files(recipe), begins=from_step < 0)

    def on_metrics(self, metrics: Mapping[str, Any], step: int, prefix: str) -> None:
        """Write a row of all numbers."""
        row = {
            name_of(prefix, name): float(value)
            for name, value in metrics.items()
            if isinstance(value, Real) or getattr(value, "ndim", None) == 0
        }
        self.run.append_metrics({"step": step, **row})
        if self.run.failure:  # NeMo-RL's loop asks no one whether it may go on
            raise OSError(self.run.failure)
        if prefix == "validation" and (line := validation_note(row)):
            log.info("step %d: %s", step, line)
        for sentence in self.watch({"step": step, **row}) if SIGNAL in row else ():
            log.warning("%s", sentence)


class ValidationSets(Callback):
    """Adds the metrics of each of several validation sets; the overall ones become the sets' means.

    NeMo-RL validates on all problems in their order, as one set, and records each response's reward.
    """

    def __init__(self, sets: Sequence[str], folder: Path, num_generations: int) -> None:
        """Args: sets: name of each validation problem's set.  folder: NeMo-RL's logs."""
        self.sets, self.folder, self.num_generations = sets, folder, num_generations

    def added_metrics(self, metrics: Mapping[str, Any], step: int, prefix: str) -> Mapping[str, float]:
        """Group the responses of a validation; without pass_k there is one for each problem."""
        if prefix != "validation" or "accuracy" not in metrics or len(set(self.sets)) < 2:
            return {}
        size = self.num_generations if "pass_k" in metrics else 1
        rewards = [row["rewards"][0] for row in json_lines(self.folder / f"val_data_step{step}.jsonl")]
        # NeMo-RL's record of a validation has rewards by position, and no problems.
        of_problems = [rewards[start : start + size] for start in range(0, len(rewards) // size * size, size)]
        groups = by_set(zip(self.sets, of_problems, strict=False))
        found = {name: {"accuracy": fmean(map(fmean, some))} for name, some in groups.items()}
        if "pass_k" in metrics:
            for name, some in groups.items():
                found[name]["pass_k"] = fmean(max(group) > 0 for group in some)
        return over_sets(found) if len(found) > 1 else {}


METRIC = "gen_kl_error"
EXCEEDS = "gen_kl_error_exceeds_bound"
"""The driver's own metric: 1 for a step whose error is above the bound, else 0."""
BF16_BOUND = 1e-2
"""Bound in BF16. Rounding gives 1e-5 to 1e-3; NeMo-RL's tests allow 0.002; stale weights gave 0.046."""
FP8_BOUND = 3e-2
"""Bound with FP8 training or rollouts. NeMo-RL's tests of them allow a token_mult_prob_error of 1.1, which is
0.007 for normally distributed differences and several times that with tails; stale weights gave 0.046."""
LARGEST_STEP = math.log(1.2)
"""Largest mean change of a token's logprob in a step, nats: the usual clip of the ratio."""

WARNING = (
    "step %d: %s is %.2g, above %.2g: rollout and policy disagree about the same tokens, so vLLM has other "
    f"weights or computes differently. Check {OVERLAP} (false), the messages of the refit, {VLLM}.precision, "
    "policy.megatron_cfg.fp8_cfg, Megatron's fusions (policy.megatron_cfg.*_fusion), and of asynchronous "
    "rollouts recompute_kv_cache_after_weight_updates (true)"
)
LENGTH = "mean_gen_tokens_per_sample"
EMPTY = (
    "step %d: no response has a token, so that nothing is learnt. NeMo-RL's asynchronous rollouts print "
    "'Error generating response' with the reason of a failed request, and go on without its response"
)


def bound(recipe: Recipe, step: int) -> float:
    """Compute the largest healthy gen_kl_error: rounding, plus k3 of the steps that rollouts may lag behind.

    Args: step: counts from 1; the first step's rollouts come from the weights that it trains.
    """
    older = LARGEST_STEP * min(recipe.rollouts_ahead, step - 1)
    return (FP8_BOUND if recipe.uses_fp8 else BF16_BOUND) + math.expm1(older) - older


class RolloutCheck(Callback):
    """Warns of a step without tokens, and of rollouts that do not come from the trained weights.

    ``gen_kl_error`` is the token mean of k3 between the rollout's logprobs and the policy's logprobs of the
    same tokens before its update; of several updates in a step NeMo-RL logs the mean. In synchronous training
    both use the same weights and differ only by rounding and kernels; asynchronous rollouts are older by some
    steps. A refit that sends old or wrong weights, or a KV cache of older weights, raises no error but shows
    here.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def added_metrics(self, metrics: Mapping[str, Any], step: int, prefix: str) -> Mapping[str, float]:
        """Judge a step, and add `EXCEEDS`."""
        if METRIC not in metrics:
            return {}
        if metrics.get(LENGTH) == 0:
            log.warning(EMPTY, step)
        error, limit = float(metrics[METRIC]), bound(self.recipe, step)
        exceeds = not error <= limit  # NaN exceeds, too
        if exceeds:
            log.warning(WARNING, step, METRIC, error, limit)
        return {EXCEEDS: float(exceeds)}


DRAWN_MEANS = (LENGTH, "truncation_rate", "avg_turns_per_sample", "mean_total_tokens_per_sample")
DRAWN_MAXIMA = ("max_gen_tokens_per_sample", "max_turns_per_sample")


class DrawnRollouts(Callback):
    """Makes a step's rollout metrics those of all draws of dynamic sampling.

    NeMo-RL logs the metrics of each draw, and with the step once more those of the last one.
    """

    def __init__(self) -> None:
        self.draws: list[Mapping[str, Any]] = []

    def added_metrics(self, metrics: Mapping[str, Any], step: int, prefix: str) -> Mapping[str, float]:
        """Collect a draw, or combine the step's; every draw has the same number of responses."""
        if prefix != "train":
            return {}
        if "loss" not in metrics:
            if LENGTH in metrics:
                self.draws.append(dict(metrics))
            return {}
        draws, self.draws = self.draws, []
        if "filtered_reward" not in metrics:
            return {}
        combined: dict[str, float] = {}
        for names, combine in ((DRAWN_MEANS, fmean), (DRAWN_MAXIMA, max)):
            for name in names:
                values = [float(draw[name]) for draw in draws if name in draw]
                if values:
                    combined[name] = combine(values)
        return combined


class RolloutRewards:
    """Reward components of the responses sampled since the last `take`, trained or dropped.

    NeMo-RL's trainer sees only a response's total reward. The environment's actor keeps the components here.
    """

    def __init__(self, num_generations: int) -> None:
        """Args: num_generations: G, responses in a group."""
        self.num_generations = num_generations
        self.num_noted = 0
        self.by_problem: dict[str, dict[int, Mapping[str, float]]] = {}

    def note(self, problem: Problem, scores: Mapping[str, float], response: int | None = None) -> int:
        """Keep a response's newest components.

        Args:    response: the number that its first turn returned; None in that turn.
        Returns: the response's number.
        """
        responses = self.by_problem.setdefault(problem.id, {})
        if response is None:
            response = self.num_noted = self.num_noted + 1
            responses[response] = scores
        elif response in responses:  # else its group was taken already
            responses[response] = scores
        return response

    def take(self) -> dict[str, float]:
        """Return ``reward/*`` and ``rollout/all_*`` of the whole groups, and forget them; {} without any.

        Parts of a group stay: asynchronous training draws while it logs.
        """
        groups, size = [], self.num_generations
        for problem, responses in list(self.by_problem.items()):
            numbers = list(responses)
            whole = len(numbers) // size * size
            for start in range(0, whole, size):
                groups.append([responses.pop(number) for number in numbers[start : start + size]])
            if not responses:
                del self.by_problem[problem]
        if not groups:
            return {}
        # NeMo-RL does not tell an environment which groups dynamic sampling has dropped.
        return reward_metrics(trained=groups, drawn=groups)


class ValidationRewards:
    """Reward components of the responses of one validation, by validation set."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        """Args: weights: ``nemo_grpo.rewards``."""
        self.weights = weights
        self.num_noted = 0
        self.by_set: dict[str, dict[int, Mapping[str, float]]] = {}

    def note(self, problem: Problem, scores: Mapping[str, float], response: int | None = None) -> int:
        """Keep a response's newest components.

        Args:    response: the number that its first turn returned; None in that turn.
        Returns: the response's number.
        """
        if response is None:
            response = self.num_noted = self.num_noted + 1
        self.by_set.setdefault(set_of(problem), {})[response] = scores
        return response

    def take(self) -> dict[str, float]:
        """Return `validation_rewards` of each set and their means, and forget them; {} without any.

        NeMo-RL measures the accuracy itself.
        """
        by_set, self.by_set = self.by_set, {}
        means = {name: validation_rewards(list(rows.values()), self.weights) for name, rows in by_set.items()}
        for metrics in means.values():
            metrics.pop("accuracy", None)
        return over_sets(means) if means else {}


class RewardMetrics(Callback):
    """Adds the environments' `RolloutRewards` to every step's metrics, `ValidationRewards` to a validation's.

    NeMo-RL's mean reward is NaN where a function abstains; it becomes the mean of the others.
    """

    def __init__(self, environments: Sequence[Mapping[str, Any]]) -> None:
        """Args: environments: name -> actor, of training and validation; only ours keep components."""
        named = dict(zip(("train", "validation"), environments, strict=False))
        self.actors = {
            prefix: [actor for actor in actors.values() if hasattr(actor, "take_rewards")]
            for prefix, actors in named.items()
        }

    def added_metrics(self, metrics: Mapping[str, Any], step: int, prefix: str) -> Mapping[str, float]:
        """Take the components that the actors hold."""
        actors = self.actors.get(prefix, [])
        if prefix not in ("train", "validation") or (prefix == "validation" and "accuracy" not in metrics):
            return {}  # NeMo-RL logs other numbers of a validation by further calls
        import ray

        taken = ray.get([actor.take_rewards.remote() for actor in actors])
        if prefix == "validation":
            return {name: value for numbers in taken for name, value in numbers.items()}
        means = {
            theirs: metrics[ours]
            for theirs, ours in (("reward", "reward/mean"), ("filtered_reward", "kept/reward/mean"))
            if ours in metrics and math.isnan(metrics.get(theirs, 0.0))
        }
        return means | {name: value for numbers in taken for name, value in numbers.items()}
