"""Evidence that each stage of a rehearsal did its work: numbers of the run, each with its bound.

A stage that has nothing to compare fails. What the run logged is compared with what follows from its recorded
tokens without NeMo-RL: rewards from the grader, logprobs from transformers, advantages, loss and gradient
from the variant.
"""

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

import torch

from nemo_grpo.core.reward_shaping import overlong_penalty
from nemo_grpo.rehearsal import recipe as small
from nemo_grpo.rehearsal.comparisons import (
    bridges_export,
    compare_folders,
    compare_with_adapters,
    compare_with_base,
    compare_with_entropy,
    compare_with_model,
    error_of_other_images,
    validation_loss,
)
from nemo_grpo.rehearsal.recomputed import (
    Recomputed,
    aligned,
    all_logprobs,
    k3,
    load,
    recompute,
    sequences_of,
)
from nemo_grpo.rehearsal.recorded import Recorded, Scored
from nemo_grpo.rehearsal.stages import Failed, Rehearsal, newest_checkpoint

log = logging.getLogger(__name__)

REFIT_BOUND = 4e-4
"""Largest healthy gen_kl_error of a rehearsal, tighter than a job's: both sides compute in BF16 on one CPU,
which gave 1e-7 to 2e-4. Old weights gave 3e-3 to 5e-2, depending on how far an update moves the policy;
hidden states divided by the temperature gave 5e-4 to 4e-3. A model that had learnt to tell pictures apart
gave 6e-4, where transformers' float32 and BF16 are 5e-4 apart: such a one is allowed twice its own."""
ADVANTAGE_TOLERANCE = 0.02
"""Largest mean difference of advantages, relative to their mean size: BF16 entropies and logprobs."""
LOSS_TOLERANCE = 0.02
"""Largest difference of the loss, relative to the size of its parts: BF16 against float32."""
NORM_TOLERANCE = 0.05
"""Largest relative difference of the gradient's norm, BF16 against float32, unless transformers' own is
larger: of a model that had learnt to tell pictures apart they were 3.2 and 6.1, and the worker's 4.8."""
MOVED = 1e-3
"""Distance of a ratio from 1 that only updates within its step give."""
SAMPLE_LENGTH = 300


class Evidence(Recorded):
    """A rehearsal's output, and a step of it computed once more."""

    @cached_property
    def recomputed(self) -> Recomputed:
        """See `recompute`."""
        return recompute(self)

    @cached_property
    def rounding_of_logprobs(self) -> float:
        """The gen_kl_error that BF16 alone makes of the first step's responses, in transformers."""
        if not (rows := self.responses(1)):
            return 0.0
        sequences, temperature = sequences_of(self, rows), self.recipe.policy.generation.temperature
        exact, rounded = (
            all_logprobs(load(self.rehearsal.model.folder, dtype), sequences, temperature)[0]
            for dtype in (torch.float32, torch.bfloat16)
        )
        return k3(rounded, exact, sequences.mask)

    @cached_property
    def rounding_of_norm(self) -> float:
        """How far BF16 alone moves the norm of `recomputed`, where it has one update and no adapters."""
        if self.recipe.num_updates_per_step > 1 or self.recipe.policy.megatron_cfg.lora_in_use:
            return 0.0
        exact, rounded = self.recomputed.gradient_norm, recompute(self, torch.bfloat16).gradient_norm
        return abs(exact - rounded) if exact is not None and rounded is not None else 0.0


@dataclass(frozen=True)
class Stage:
    """A row of the table.  Attributes: name; ok; proof: numbers, or the reason why not."""

    name: str
    ok: bool
    proof: str


def stages(rehearsal: Rehearsal, failure: str | None = None) -> list[Stage]:
    """All stages, in order.

    Args: failure: why training did not finish. Its output is judged anyway; the first stage that lacks
          something shows the reason, and nothing is exported.
    """
    evidence = Evidence(rehearsal)
    names = SUPERVISED if evidence.is_supervised else tuple(CHECKS)
    checks = {name: CHECKS[name] for name in names if failure is None or name not in AFTER_TRAINING}
    found = [_judged(name, check, evidence) for name, check in checks.items()]
    if failure is None:
        return found
    at = next((at for at, stage in enumerate(found) if not stage.ok), len(found) - 1)
    return [*found[:at], Stage(found[at].name, False, failure)]


def _judged(name: str, check: Callable[[Evidence], str], evidence: Evidence) -> Stage:
    try:
        return Stage(name, True, check(evidence))
    except Failed as failure:
        return Stage(name, False, str(failure))
    except Exception as error:  # what a check cannot read proves nothing
        log.exception("stage %s", name)
        return Stage(name, False, f"its evidence cannot be read: {error!r}")


def _refuse(fails: bool, reason: str) -> None:
    if fails:
        raise Failed(reason)


def setup(evidence: Evidence) -> str:
    r = evidence.rehearsal
    _refuse(not evidence.steps, "no step was trained")
    engine = "vLLM" if r.stack.vllm_python else "the stand-in sampler"
    what = "NeMo-RL's supervised training" if evidence.is_supervised else f"rollouts by {engine}"
    return f"{r.layout.number} policy worker(s), {r.layout}; {what}"


def refit(evidence: Evidence) -> str:
    """Rollouts come from the trained weights, also after updates; old weights would have been seen."""
    recipe = evidence.recipe
    errors = evidence.series("mismatch/kl")
    ratio = max(evidence.series("train/token_mult_prob_error"), default=math.nan)
    shown = f"gen_kl_error {', '.join(f'{e:.1e}' for e in errors)}; token_mult_prob_error at most {ratio:.4f}"
    _refuse(len(errors) < max(len(evidence.steps), 1), f"{shown}; not logged in every step")
    lengths = evidence.series("length/mean")
    _refuse(not all(lengths), f"{shown}; mean lengths {lengths}: without tokens nothing is compared")
    bounded = errors[:1] if recipe.rollouts_ahead else errors
    allowed = REFIT_BOUND
    if not all(error <= allowed for error in bounded):
        allowed = max(allowed, 2 * evidence.rounding_of_logprobs)
    _refuse(
        not all(error <= allowed for error in bounded),
        f"{shown}; the bound{' of the first step' * (len(bounded) < len(errors))} is {allowed:.2g}",
    )
    if recipe.rollouts_ahead:
        return f"{shown}; later steps have no bound: asynchronous rollouts may be of older weights"
    stale = _error_of_old_weights(evidence)
    _refuse(
        not stale > allowed,
        f"{shown}; the first weights would have given {stale:.1e} later, so that a refit is not tested",
    )
    return f"{shown} (bound {allowed:.2g}; the first weights would give up to {stale:.1e})"


def _error_of_old_weights(evidence: Evidence) -> float:
    """gen_kl_error of the later steps, had the policy stayed what it was in the first; the largest."""
    model, temperature = load(evidence.rehearsal.model.folder), evidence.recipe.policy.generation.temperature
    errors = [0.0]
    for step in sorted(evidence.steps)[1:]:
        if rows := evidence.responses(step):
            sequences = sequences_of(evidence, rows)
            old, _ = all_logprobs(model, sequences, temperature)
            errors.append(k3(old, aligned(rows, "generation_logprobs"), sequences.mask))
    return max(errors)


def rollout(evidence: Evidence) -> str:
    """Every response is recorded, and the first step's are sampled from the model at the temperature."""
    lengths, cut = evidence.series("length/mean"), evidence.series("train/truncation_rate")
    _refuse(not lengths, "no responses are logged")
    number = evidence.recipe.num_sequences_per_step
    counts = {step: len(evidence.responses(step)) for step in evidence.steps}
    _refuse(set(counts.values()) != {number}, f"responses recorded by step: {counts}; {number} are sampled")
    shown = f"mean length {fmean(lengths):.1f} tokens, {fmean(cut or [0.0]):.0%} truncated"
    first = min(evidence.steps)
    _refuse(first != 1, f"{shown}; the first step is not logged")
    rows, folder = evidence.responses(1), evidence.rehearsal.model.folder
    found = compare_with_model(evidence, folder, rows, "generation_logprobs", "sampler")
    if evidence.sees_images:
        found += f" ({error_of_other_images(evidence, rows, 'generation_logprobs')})"
    return f"{shown}; in step 1 {found}"


def rewards(evidence: Evidence) -> str:
    """The recipe's rewards on the responses of the run, component by component, are those it trained on."""
    means = evidence.series("reward/mean")
    components = reward_components(evidence)
    shown = f"mean {', '.join(f'{mean:.3f}' for mean in means)}; {_shown(components)}"
    _refuse(not means or not all(map(math.isfinite, means)), shown)
    if not evidence.is_graded_here:
        return f"{shown}; by NeMo-RL's environment"
    wrong = [
        one for one in evidence.scored if not math.isclose(one.recorded, _shaped(evidence, one), abs_tol=1e-4)
    ]
    if wrong:
        raise Failed(f"{shown}; {_disagreement(wrong, len(evidence.scored))}")
    _refuse(not evidence.scored, f"{shown}, so no reward is compared")
    return f"{shown}; {len(evidence.scored)} rewards are the grader's"


def _shaped(evidence: Evidence, one: Scored) -> float:
    """A reward with the recipe's penalty of long responses."""
    shaping = evidence.recipe.grpo.reward_shaping
    if not shaping.enabled:
        return one.reward
    penalty = overlong_penalty(
        torch.tensor([one.length]),
        max_response_length=shaping.max_response_length,
        buffer_length=shaping.overlong_buffer_length,
        penalty=shaping.overlong_buffer_penalty,
    )
    return one.reward + float(penalty)


def _disagreement(wrong: Sequence[Scored], number: int) -> str:
    one = wrong[0]
    return (
        f"{len(wrong)} of {number} are not what the grader says: {one.response[:SAMPLE_LENGTH]!r} has "
        f"{one.recorded:g}, the grader says {one.reward:g}"
    )


def advantage(evidence: Evidence) -> str:
    """The variant's advantages of the recorded rewards are those that were trained on."""
    shares, is_stock = evidence.series("groups/valid_fraction"), evidence.recipe.loss_fn.is_stock
    if is_stock:
        shares = [percent / 100 for percent in evidence.series("baseline_reward/pct_mixed")]
    shown = f"groups with signal {', '.join(f'{share:.0%}' for share in shares)}"
    _refuse(not any(shares), f"{shown}: every response of a group gets the same reward, so nothing is learnt")
    if is_stock:
        return f"{shown}; by NeMo-RL's estimator, not recomputed"
    again = evidence.recomputed
    assert again.advantages is not None, "rollouts"
    assert again.recorded_advantages is not None, "rollouts"
    size = float(again.advantages.abs().mean())
    difference = float((again.advantages - again.recorded_advantages).abs().mean())
    _refuse(size == 0, f"{shown}; every advantage of step {again.step} is 0")
    _refuse(
        not difference <= ADVANTAGE_TOLERANCE * size,
        f"{shown}; advantages of step {again.step} differ from the variant's by {difference / size:.1%}",
    )
    return f"{shown}; step {again.step}'s are the variant's up to {difference / size:.1%}"


def update(evidence: Evidence) -> str:
    """Loss and gradient are what transformers and the variant give for the same tokens."""
    losses, norms = evidence.series("loss/total"), evidence.series("grad_norm")
    few = slice(None, None, max(1, len(losses) // small.NUM_STEPS))
    shown = f"loss {', '.join(f'{x:.4f}' for x in losses[few])}; "
    shown += f"gradient norm {', '.join(f'{x:.3f}' for x in norms[few])}"
    _refuse(not all(map(math.isfinite, [*losses, *norms])), shown)
    ratios = evidence.series("train/probs_ratio_max")  # the norm is that of a step's last update alone
    moves = any(norms) or any(abs(ratio - 1) > MOVED for ratio in ratios)
    _refuse(not moves, f"{shown}: no step moved the weights")
    if evidence.recipe.loss_fn.is_stock:
        return f"{shown}; by NeMo-RL's loss, not recomputed"
    return f"{shown}; {_loss_and_norm(evidence)}"


def _loss_and_norm(evidence: Evidence) -> str:
    again = evidence.recomputed
    logged = evidence.steps[again.step]
    loss, norm = logged["loss/total"], logged["grad_norm"]
    shown = f"step {again.step} recomputed: loss {again.loss:.4f}"
    off = abs(loss - again.loss) / max(again.scale, 1e-12)
    _refuse(not off <= LOSS_TOLERANCE, f"{shown}, but {loss:.4f} is logged")
    if again.gradient_norm is None:
        return f"{shown}, its first update's"
    apart, allowed = abs(norm - again.gradient_norm), NORM_TOLERANCE * (again.largest_norm or 1.0)
    shown += f", norm {again.gradient_norm:.3f}"
    if not apart <= allowed and (rounding := evidence.rounding_of_norm) > allowed:
        shown, allowed = f"{shown} (BF16 alone moves it by {rounding:.3f})", rounding
    _refuse(not apart <= allowed, f"{shown}, but {norm:.3f} is logged")
    return shown


def validation(evidence: Evidence) -> str:
    """The logged accuracy is the grader's; after supervised training the loss is transformers'."""
    if not evidence.rehearsal.recipe.grpo.validates:
        return "the recipe has none"
    name = "val_loss" if evidence.is_supervised else "accuracy"
    found = evidence.validations(name)
    _refuse(not found, f"no validation/{name} is logged")
    step, value = max(found.items())
    shown = f"{name} {value:.3f} of {small.NUM_VALIDATION} problems"
    if evidence.is_supervised:
        again = validation_loss(evidence)
        _refuse(
            not math.isclose(value, again, rel_tol=LOSS_TOLERANCE), f"{shown}, but {again:.3f} recomputed"
        )
        return f"{shown}; {again:.3f} recomputed"
    if not evidence.is_graded_here:
        return f"{shown}, by NeMo-RL's environment"
    graded = evidence.validated(step)
    _refuse(len(graded) != small.NUM_VALIDATION, f"{shown}; {len(graded)} of them are recognised")
    accuracy = fmean(one.scores["accuracy"] for one in graded)
    _refuse(not math.isclose(value, accuracy, abs_tol=1e-4), f"{shown}; the grader says {accuracy:.3f}")
    return f"{shown}, as the grader says"


def checkpoint(evidence: Evidence) -> str:
    newest = newest_checkpoint(evidence.rehearsal)
    side = newest / "policy" / "tokenizer"
    _refuse(not (side / "config.json").is_file(), f"{newest} has no config.json and tokenizer")
    last = max(evidence.steps, default=0)
    _refuse(newest.name != f"step_{last}", f"{newest} is the newest, but step {last} was trained")
    return f"{newest.name}, with config.json and tokenizer"


def stop_and_resume(evidence: Evidence) -> str:
    done, stop = [int(row["step"]) for row in evidence.rows], evidence.rehearsal.stopped_after
    wanted = list(range(1, small.num_steps(evidence.recipe) + 1))
    _refuse(done != wanted, f"steps {done} are logged; each of {wanted[0]} to {wanted[-1]} once is expected")
    return f"SIGUSR1 in step {stop}: exit 75; started again at step {stop + 1}: exit 0"


def export(evidence: Evidence) -> str:
    """Compare the converters' export of the stop's checkpoint with Bridge's and with the resumed worker."""
    rehearsal, recipe = evidence.rehearsal, evidence.recipe
    source, ours, base = evidence.stop_checkpoint, evidence.exported, evidence.rehearsal.model.folder
    found = [f"{source.name} in {rehearsal.seconds.get('conversion', 0.0):.1f} s"]
    compare_with_base(ours, base)
    if recipe.policy.megatron_cfg.lora_in_use is None:
        found.append(compare_folders(ours, bridges_export(rehearsal, source)))
    else:
        found.append(compare_with_adapters(ours, base, source, recipe.policy.megatron_cfg))
    if evidence.is_supervised:
        return "; ".join(found)
    rows = evidence.responses(evidence.resumed_step)
    _refuse(source.name != f"step_{rehearsal.stopped_after}", f"{source}: the stop's checkpoint is gone")
    _refuse(not rows, f"no responses of step {evidence.resumed_step} are recorded")
    if not recipe.policy_is_scored:  # prev_logprobs are zeros
        logged = evidence.steps[evidence.resumed_step]["train/approx_entropy"]
        found.append(compare_with_entropy(evidence, ours, rows, logged))
    else:
        found.append(compare_with_model(evidence, ours, rows, "prev_logprobs", "resumed worker"))
    return "; ".join(found)


CHECKS: dict[str, Callable[[Evidence], str]] = {
    "setup": setup,
    "refit": refit,
    "rollout": rollout,
    "reward": rewards,
    "advantage": advantage,
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


# ---------------------------------------------------------------------- responses


def reward_components(evidence: Evidence) -> dict[str, float]:
    """Mean of each component that the recipe weights, over the run's responses."""
    weights = evidence.rehearsal.taught.nemo_grpo.rewards
    found = evidence.scored
    return {name: fmean(one.scores[name] for one in found) for name in weights} if found else {}


def _shown(components: Mapping[str, float]) -> str:
    return (
        ", ".join(f"{name} {mean:.2f}" for name, mean in components.items()) or "no response was recognised"
    )


def sample(evidence: Evidence) -> str:
    """One response with its reward; the best one."""
    best = max(evidence.scored, key=lambda one: one.reward, default=None)
    if best is None:
        return ""
    shown = re.sub(r"\s+", " ", best.response)[:SAMPLE_LENGTH]
    question = re.sub(r"\s+", " ", best.problem.question)[:SAMPLE_LENGTH]
    return f"{question!r} -> {shown!r}: reward {best.reward:g} ({_shown(best.scores)})"
