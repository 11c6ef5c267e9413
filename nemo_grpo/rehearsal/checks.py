"""Proof that each stage of a rehearsal did its work: numbers of the run, each with its bound.

A stage with nothing to compare fails.
"""

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from nemo_grpo.core.advantages import overlong_penalty
from nemo_grpo.rehearsal import overrides as small
from nemo_grpo.rehearsal.export import bridges_export, compare_folders, compare_with_base, convert
from nemo_grpo.rehearsal.run_output import Recorded, Row, Scored, num_tokens
from nemo_grpo.rehearsal.stages import Failed, Rehearsal, metrics, newest_checkpoint
from nemo_grpo.tasks.base import VALIDATION_SET
from nemo_grpo.tasks.scoring import component_means, over_sets

log = logging.getLogger(__name__)

REFIT_BOUND = 1e-3
"""Largest healthy gen_kl_error of a rehearsal, tighter than a job's: both sides compute in BF16 on one CPU,
which gave 1e-7 to 6e-4. Old weights gave 3e-3 to 5e-2, depending on how far an update moves the policy."""
AT_THE_CUT = 0.02
"""Share of tokens at which BF16 may move a token across top_p; the kept tokens' logprobs then differ by up to
-log(top_p)."""
MOVED = 1e-3
"""Distance of a ratio from 1 that only an update within the step explains."""
SAMPLE_LENGTH = 300
"""Characters of a text that the report shows."""


@dataclass(frozen=True)
class Stage:
    """A row of the table.  Attributes: proof: numbers, or the reason why not."""

    name: str
    ok: bool
    proof: str


def stages(rehearsal: Rehearsal, failure: str | None = None) -> list[Stage]:
    """Check all stages, in order.

    Args: failure: reason why training did not finish; its output is checked anyway. The first stage that
          fails shows the reason, and nothing is exported.
    """
    recorded = Recorded(rehearsal)
    names = SUPERVISED if recorded.is_supervised else tuple(CHECKS)
    checks = {name: CHECKS[name] for name in names if failure is None or name not in AFTER_TRAINING}
    found = [judged(name, check, recorded) for name, check in checks.items()]
    if failure is None:
        return found
    at = next((at for at, stage in enumerate(found) if not stage.ok), len(found) - 1)
    return [*found[:at], Stage(found[at].name, False, failure)]


def judged(name: str, check: Callable[[Recorded], str], recorded: Recorded) -> Stage:
    """Run one check."""
    try:
        return Stage(name, True, check(recorded))
    except Failed as failure:
        return Stage(name, False, str(failure))
    except Exception as error:  # unreadable output proves nothing
        log.exception("stage %s", name)
        return Stage(name, False, f"its evidence cannot be read: {error!r}")


def _refuse(fails: bool, reason: str) -> None:
    if fails:
        raise Failed(reason)


def setup(run: Recorded) -> str:
    """Prove that steps were trained."""
    r = run.rehearsal
    _refuse(not run.steps, "no step was trained")
    engine = "vLLM" if r.stack.vllm_python else "the stand-in sampler"
    what = "NeMo-RL's supervised training" if run.is_supervised else f"rollouts by {engine}"
    return f"{r.layout.number} policy worker(s), {r.layout}; {what}"


def refit(run: Recorded) -> str:
    """Prove that rollouts come from the trained weights, also after updates."""
    errors = run.series("mismatch/kl")
    ratio = max(run.series("train/token_mult_prob_error"), default=math.nan)
    shown = f"gen_kl_error {', '.join(f'{e:.1e}' for e in errors)}; token_mult_prob_error at most {ratio:.4f}"
    _refuse(len(errors) < max(len(run.steps), 1), f"{shown}; not logged in every step")
    lengths = run.series("length/mean")
    _refuse(not all(lengths), f"{shown}; mean lengths {lengths}: without tokens nothing is compared")
    generation, allowed = run.recipe.policy.generation, REFIT_BOUND
    if (generation.top_p < 1 or generation.top_k) and run.recipe.policy_is_scored:
        allowed += AT_THE_CUT * (1 / generation.top_p - 1 + math.log(generation.top_p))
        errors = [_error_within_both_sets(run.responses(step)) for step in sorted(run.steps)]
        shown += f"; of tokens within both sides' top_p and top_k {', '.join(f'{e:.1e}' for e in errors)}"
    is_synchronous = not run.recipe.rollouts_ahead
    bounded = errors if is_synchronous else errors[:1]
    _refuse(
        not all(error <= allowed for error in bounded),
        f"{shown}; the bound{'' if is_synchronous else ' of the first step'} is {allowed:.2g}",
    )
    if is_synchronous:
        return f"{shown} (bound {allowed:.2g})"
    return f"{shown}; later steps have no bound: asynchronous rollouts may be of older weights"


def _error_within_both_sets(rows: Sequence[Row]) -> float:
    """Compute the error without tokens that top_p and top_k cut for the policy alone: their logprob is 0."""
    columns = ("prev_logprobs", "generation_logprobs", "token_loss_mask")
    policy, sampled, mask = (torch.tensor([row[name][0] for row in rows]) for name in columns)
    kept = mask.bool() & ((policy != 0) | (sampled == 0))
    difference = (policy - sampled)[kept].double()
    return float((difference.exp() - difference - 1).mean())


def rollout(run: Recorded) -> str:
    """Prove that every response is recorded, with the number of tokens that was logged and fits."""
    cut = run.series("train/truncation_rate")
    number, longest = run.recipe.num_sequences_per_step, run.recipe.policy.max_total_sequence_length
    responses = {step: run.responses(step) for step in run.steps}
    counts = {step: len(rows) for step, rows in responses.items()}
    _refuse(set(counts.values()) != {number}, f"responses recorded by step: {counts}; {number} are sampled")
    _refuse(min(counts) != 1, f"the first step is not logged, but step {min(counts)}")
    lengths = {step: [num_tokens(row) for row in rows] for step, rows in responses.items()}
    every = [length for of_step in lengths.values() for length in of_step]
    shown = f"{number} responses a step, {min(every)} to {max(every)} tokens, {fmean(cut or [0.0]):.0%} cut"
    _refuse(not 0 < min(every) <= max(every) < longest, f"{shown}; 1 to {longest - 1} are possible")
    for step, of_step in lengths.items():
        metrics_of_step = run.steps[step]
        if run.keeps_a_part:
            disagreement = _other_tokens(responses[step], metrics_of_step, run.recipe.num_updates_per_step)
        else:
            disagreement = _other_mean(of_step, metrics_of_step)
        _refuse(bool(disagreement), f"{shown}; in step {step} {disagreement}")
    return shown


def _other_mean(lengths: Sequence[int], logged: Mapping[str, float]) -> str:
    """Compare the mean of the recorded lengths with the logged one; returns how they differ, or nothing."""
    recorded, mean = fmean(lengths), logged.get("length/mean", math.nan)
    if math.isclose(mean, recorded, rel_tol=1e-4):
        return ""
    return f"{recorded:.2f} in the mean, but {mean:.2f} is logged"


def _other_tokens(rows: Sequence[Row], logged: Mapping[str, float], num_updates: int) -> str:
    """Compare recorded tokens with those that the loss counted; returns how they differ, or nothing.

    Dynamic sampling keeps a part of what was drawn. The record holds that part, and NeMo-RL's mean length is
    of the whole last draw. Its loss counts the same responses as the record, in the mean of the step's
    microbatches, whose number may differ between updates: the count lies between those of the updates.
    """
    trained = [num_tokens(row) * row["sample_loss_mask"][0] for row in rows]
    size = len(trained) // num_updates
    totals = [sum(trained[start : start + size]) for start in range(0, len(trained), size)]
    counted = logged.get("train/global_valid_toks", math.nan)
    if min(totals) - 0.01 <= counted <= max(totals) + 0.01:
        return ""
    return f"{', '.join(f'{total:g}' for total in totals)} tokens an update, but {counted:g} are logged"


def rewards(run: Recorded) -> str:
    """Prove that the run trained on the recipe's rewards: each response is graded again."""
    means = run.series("reward/mean")
    components = reward_components(run)
    shown = f"mean {', '.join(f'{mean:.3f}' for mean in means)}; {_shown(components)}"
    _refuse(not means or not all(map(math.isfinite, means)), shown)
    if not run.is_graded_here:
        return f"{shown}; by NeMo-RL's environment"
    for one in run.scored:
        _refuse(
            not _same(one.recorded, _scaled(run, one.reward) + _penalty(run, one)),
            f"{shown}; {one.response[:SAMPLE_LENGTH]!r} has {one.recorded:g}, the grader says {one.reward:g}",
        )
    _refuse(not run.scored, f"{shown}, so no reward is compared")
    return f"{shown}; {len(run.scored)} rewards are the grader's"


def _same(recorded: float, graded: float) -> bool:
    """Compare two rewards; NaN means that a function abstained."""
    return math.isclose(recorded, graded, abs_tol=1e-4) or (math.isnan(recorded) and math.isnan(graded))


def _scaled(run: Recorded, graded: float) -> float:
    """Scale a reward as NeMo-RL does before it penalises lengths."""
    scaling = run.reward_scaling
    if not scaling["enabled"]:
        return graded
    source_range = scaling["source_max"] - scaling["source_min"]
    target_range = scaling["target_max"] - scaling["target_min"]
    within = min(max(graded, scaling["source_min"]), scaling["source_max"])
    return float(scaling["target_min"] + (within - scaling["source_min"]) / source_range * target_range)


def _penalty(run: Recorded, one: Scored) -> float:
    shaping = run.recipe.grpo.reward_shaping
    if not shaping.enabled:
        return 0.0
    return float(
        overlong_penalty(
            torch.tensor([one.length]),
            max_response_length=shaping.max_response_length,
            buffer_length=shaping.overlong_buffer_length,
            penalty=shaping.overlong_buffer_penalty,
        )
    )


def update(run: Recorded) -> str:
    """Prove that loss and gradient are finite, groups have signal, and a step moves the weights."""
    losses, norms = run.series("loss/total"), run.series("grad_norm")
    few = slice(None, None, max(1, len(losses) // small.NUM_STEPS))
    shown = f"loss {', '.join(f'{x:.4f}' for x in losses[few])}; "
    shown += f"gradient norm {', '.join(f'{x:.3f}' for x in norms[few])}"
    _refuse(not all(map(math.isfinite, [*losses, *norms])), shown)
    if not run.is_supervised:
        if run.recipe.loss_fn.is_stock:  # NeMo-RL's asynchronous trainer logs no share of groups
            size = run.recipe.grpo.num_generations_per_prompt
            shares = [_share_with_signal(run.responses(step), size) for step in sorted(run.steps)]
        else:
            shares = run.series("groups/valid_fraction")
        shown += f"; groups with signal {', '.join(f'{share:.0%}' for share in shares)}"
        _refuse(not any(shares), f"{shown}: the rewards within each group are equal, so nothing is learnt")
    ratios = run.series("train/probs_ratio_max")  # the norm is that of a step's last update alone
    moves = any(norms) or any(abs(ratio - 1) > MOVED for ratio in ratios)
    _refuse(not moves, f"{shown}: no step moved the weights")
    return shown


def _share_with_signal(rows: Sequence[Row], group_size: int) -> float:
    """Compute the share of groups in which a response has an advantage other than 0."""
    has_advantage = [any(row["advantages"][0]) for row in rows]
    groups = [has_advantage[start : start + group_size] for start in range(0, len(rows), group_size)]
    return fmean(map(any, groups))


def validation(run: Recorded) -> str:
    """Prove that the logged accuracy is the grader's; supervised training logs a loss."""
    if not run.rehearsal.recipe.grpo.validates:
        return "the recipe has none"
    name = "val_loss" if run.is_supervised else "accuracy"
    found = run.validations(name)
    _refuse(not found, f"no validation/{name} is logged")
    step, value = max(found.items())
    number = run.recipe.grpo.num_val_problems
    shown = f"{name} {value:.3f} of {number} problems"
    _refuse(not math.isfinite(value), shown)
    if run.is_supervised:
        return shown
    if not run.is_graded_here:
        return f"{shown}, by NeMo-RL's environment"
    graded = run.validated(step)
    _refuse(len(graded) != number, f"{shown}; {len(graded)} of them are recognised")
    scores = dict[str, list[float]]()
    for one in graded:
        scores.setdefault(one.problem.metadata.get(VALIDATION_SET, ""), []).append(one.scores["accuracy"])
    sets = {name: {"accuracy": fmean(some)} for name, some in scores.items()}
    for metric, accuracy in over_sets(sets).items():
        logged = run.validations(metric).get(step, math.nan)
        right = math.isclose(logged, accuracy, abs_tol=1e-4)
        _refuse(not right, f"{shown}; {metric} {logged:.3f}: the grader says {accuracy:.3f}")
    if len(sets) > 1:
        shown += "".join(f", {name} {row['accuracy']:.3f}" for name, row in sets.items())
    return f"{shown}, as the grader says"


def checkpoint(run: Recorded) -> str:
    """Prove that the newest checkpoint is the last step's and has the side files."""
    newest = newest_checkpoint(run.rehearsal)
    side = newest / "policy" / "tokenizer"
    _refuse(not (side / "config.json").is_file(), f"{newest} has no config.json and tokenizer")
    last = max(run.steps, default=0)
    _refuse(newest.name != f"step_{last}", f"{newest} is the newest, but step {last} was trained")
    return f"{newest.name}, with config.json and tokenizer"


def stop_and_resume(run: Recorded) -> str:
    """Prove that every step is logged once."""
    stop = run.rehearsal.stopped_after
    done = [int(row["step"]) for row in metrics(run.recipe) if "loss/total" in row]
    wanted = list(range(1, small.num_steps(run.recipe) + 1))
    _refuse(done != wanted, f"steps {done} are logged; each of {wanted[0]} to {wanted[-1]} once is expected")
    return f"SIGUSR1 in step {stop}: exit 75; started again at step {stop + 1}: exit 0"


def export(run: Recorded) -> str:
    """Prove that the exported weights have moved, and equal Bridge's export where Bridge has one."""
    rehearsal, source = run.rehearsal, newest_checkpoint(run.rehearsal)
    ours = convert(rehearsal, source)
    shown = f"{source.name} in {rehearsal.seconds.get('conversion', 0.0):.1f} s; "
    shown += compare_with_base(ours, rehearsal.model.folder)
    if run.recipe.policy.megatron_cfg.lora_in_use:
        return f"{shown}, adapters merged"
    return f"{shown}; {compare_folders(ours, bridges_export(rehearsal, source))}"


CHECKS: dict[str, Callable[[Recorded], str]] = {
    "setup": setup,
    "refit": refit,
    "rollout": rollout,
    "reward": rewards,
    "update": update,
    "validation": validation,
    "checkpoint": checkpoint,
    "stop and resume": stop_and_resume,
    "export": export,
}
"""Stage -> the function that proves it, or raises `Failed`."""
SUPERVISED = ("setup", "update", "validation", "checkpoint", "stop and resume", "export")
"""Stages of a run on demonstrations, which has no rollouts."""
AFTER_TRAINING = ("export",)
"""Stages that need a finished training."""


def reward_components(run: Recorded) -> dict[str, float]:
    """Compute the mean of each component that the recipe weights, over the run's responses."""
    weights = run.rehearsal.toy_recipe.nemo_grpo.rewards
    means = component_means([one.scores for one in run.scored]) if run.scored else {}
    return {name: means[f"reward/{name}"] for name in weights if f"reward/{name}" in means}


def _shown(components: Mapping[str, float]) -> str:
    listed = ", ".join(f"{name} {mean:.2f}" for name, mean in components.items())
    return listed or "no response was recognised"


def sample(run: Recorded) -> str:
    """Show the best response with its reward."""
    rewarded = [one for one in run.scored if not math.isnan(one.reward)]
    best = max(rewarded, key=lambda one: one.reward, default=None)
    if best is None:
        return ""
    texts = (re.sub(r"\s+", " ", text)[:SAMPLE_LENGTH] for text in (best.problem.question, best.response))
    return f"{' -> '.join(map(repr, texts))}: reward {best.reward:g} ({_shown(best.scores)})"
