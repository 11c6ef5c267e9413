"""Steps of training: of the algorithm, on sampled responses; or supervised, on demonstrations.

A step has two halves, `Sampled` between them: sample and `reinforce`, or show and `supervise`.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from nemo_grpo.core.advantages import implausible_advantage, overlong_penalty
from nemo_grpo.core.objective import as_kept
from nemo_grpo.core.resampling import accumulate_groups
from nemo_grpo.engine.learning import Learner
from nemo_grpo.engine.megatron.microbatches import Scores
from nemo_grpo.engine.rollout import Rollouts
from nemo_grpo.engine.step_metrics import Clock, drawn_metrics, mean_metrics, mean_scores, signal_shares
from nemo_grpo.recipe import Recipe
from nemo_grpo.run.diagnostics import StepDiagnostics
from nemo_grpo.run.groups import Group, Step, assemble
from nemo_grpo.support.distributed import from_first_rank

log = logging.getLogger(__name__)
Row = dict[str, Any]


@dataclass(frozen=True)
class Sampled:
    """The groups of one step, and how long they took.

    Attributes: drawn: all groups that were drawn for them.
    """

    groups: list[Group]
    drawn: list[Group]
    clock: Clock = field(default_factory=Clock)


class Method(NamedTuple):
    """The two halves of a step."""

    sample: Callable[[Rollouts, Learner], Sampled]
    learn: Callable[[Learner, Sampled, StepDiagnostics], Row]


def method_of(recipe: Recipe) -> Method:
    """Return the algorithm's step, or the supervised one."""
    if recipe.loss_fn.learns_from_demonstrations:
        return Method(show, supervise)
    return Method(sample, reinforce)


# ------------------------------------------------------------------ sampling


def sample(rollouts: Rollouts, learner: Learner) -> Sampled:
    """Sample the groups of one step from the policy, and move its position in the stream of problems."""
    clock = Clock()
    grpo = rollouts.recipe.grpo
    state = learner.state
    drawn = list[Group]()
    rollouts.generator.update_weights(learner.policy.named_tensors())

    def draw() -> list[Group]:
        groups = rollouts.draw(state.next_problem)
        state.next_problem += grpo.num_prompts_per_step
        drawn.extend(groups)
        return groups

    if grpo.use_dynamic_sampling:
        threshold, max_draws = rollouts.recipe.loss_fn.resampling(grpo.dynamic_sampling_max_gen_batches)
        gathered = accumulate_groups(
            draw,
            partial(Group.has_signal, drop_truncated=grpo.overlong_filtering),
            num_groups=grpo.num_prompts_per_step,
            valid_fraction_threshold=threshold,
            max_draws=max_draws,
        )
        groups = list(gathered.take(grpo.num_prompts_per_step))
    else:
        groups = draw()
    clock.lap("time/rollout")
    return Sampled(groups, drawn, clock)


def show(rollouts: Rollouts, learner: Learner) -> Sampled:
    """Take the next demonstrations, each a group of its own."""
    assert rollouts.demonstrations is not None
    clock = Clock()
    training = rollouts.demonstrations.training
    first = learner.state.next_problem
    number = rollouts.recipe.grpo.num_prompts_per_step
    groups = from_first_rank(lambda: [training(index) for index in range(first, first + number)])
    learner.state.next_problem += number
    clock.lap("time/data")
    return Sampled(groups, groups, clock)


# ------------------------------------------------------------------ learning


def reinforce(learner: Learner, sampled: Sampled, diagnostics: StepDiagnostics) -> Row:
    """Take one step of the algorithm on sampled groups: shape, score, update; returns its metrics.

    Args: diagnostics: measures the tokens of some steps.
    """
    recipe = learner.recipe
    state = learner.state
    clock = sampled.clock
    step = shape(assemble(sampled.groups), recipe)
    prepared, updates = learner.learn(step, clock)
    if warning := implausible_advantage(prepared):
        log.warning("step %d: %s", state.step, warning)

    row: Row = {"step": state.step, "rollout/num_prompts": len(sampled.drawn)}
    row |= {name: float(value) for name, value in prepared.metrics.items()}
    row |= mean_scores(sampled.groups, sampled.drawn)
    row |= signal_shares(sampled.drawn, drop_truncated=recipe.grpo.overlong_filtering)
    if recipe.grpo.use_dynamic_sampling:  # the groups that were dropped were rolled out, too
        drawn = drawn_metrics(shape(assemble(sampled.drawn), recipe))
        row = as_kept(row) | drawn | mean_scores(sampled.drawn, sampled.drawn)
    row |= mean_metrics(updates)
    row |= clock.laps
    if diagnostics.is_due(state.step):
        tokens = step.sequences.input_ids[:, 1:]
        row |= diagnostics.measure(learner.objective, prepared, tokens, state.step)
    return row | totals(learner, step, clock) | {"steps/no_signal": state.no_signal}


def supervise(learner: Learner, sampled: Sampled, _diagnostics: StepDiagnostics) -> Row:
    """Take one update on demonstrations; returns its metrics."""
    clock = sampled.clock
    step = assemble(sampled.groups)
    prepared = learner.prepare(step, Scores(step.generation_logprobs))
    updates = learner.update(prepared, step)
    clock.lap("time/update")
    learner.state.count(updates, int(step.token_mask.sum()))

    lengths = step.token_mask.sum(1)
    row: Row = {"step": learner.state.step} | mean_metrics(updates)
    row |= {"length/mean": float(lengths.double().mean()), "length/max": float(lengths.max())}
    return row | clock.laps | totals(learner, step, clock)


def shape(step: Step, recipe: Recipe) -> Step:
    """Apply the recipe's soft length penalty, and its filter of truncated responses.

    A truncated response that is left out still counts with its reward in its group.
    """
    shaping = recipe.grpo.reward_shaping
    if shaping.enabled:
        penalty = overlong_penalty(
            step.response_lengths,
            max_response_length=shaping.max_response_length,
            buffer_length=shaping.overlong_buffer_length,
            penalty=shaping.overlong_buffer_penalty,
        )
        step = replace(step, rewards=step.rewards + penalty)
    if recipe.grpo.overlong_filtering:
        step = replace(step, sample_mask=step.sample_mask & ~step.truncated)
    return step


def totals(learner: Learner, step: Step, clock: Clock) -> Row:
    """Return a step's time and rate, and the run's counters."""
    seconds = sum(clock.laps.values())
    return {
        "time/step": seconds,
        "tokens_per_second": float(step.token_mask.sum()) / seconds,
        "steps/skipped": learner.state.skipped,
        "tokens/trained": learner.state.tokens,
    }
