"""Training steps: reinforcement learning on sampled responses, or supervised learning on demonstrations.

A step has two halves. The first one, `sample` or `demonstrate`, makes a `Sampled` and does not change the
learner. The second one, `reinforce` or `supervise`, trains on it.
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
from nemo_grpo.engine.step_metrics import Clock, mean_metrics, mean_scores, sampled_metrics, signal_shares
from nemo_grpo.recipe import Recipe
from nemo_grpo.run.diagnostics import StepDiagnostics
from nemo_grpo.run.groups import Group, Step, assemble
from nemo_grpo.support.distributed import from_first_rank

log = logging.getLogger(__name__)
Row = dict[str, Any]


@dataclass(frozen=True)
class Sampled:
    """Groups of one step, and the stopwatch of the step.

    Attributes:
        groups: Groups that the step trains on.
        all_groups: All groups that were sampled for the step. Dynamic sampling drops some of them.
        clock: Stopwatch, which has measured the first half.
    """

    groups: list[Group]
    all_groups: list[Group]
    clock: Clock = field(default_factory=Clock)


class Method(NamedTuple):
    """The two halves of a step."""

    sample: Callable[[Rollouts, Learner], Sampled]
    learn: Callable[[Learner, Sampled, StepDiagnostics], Row]


def method_of(recipe: Recipe) -> Method:
    """Return the two halves of the recipe's steps: on rollouts, or on demonstrations."""
    if recipe.loss_fn.learns_from_demonstrations:
        return Method(demonstrate, supervise)
    return Method(sample, reinforce)


def sample(rollouts: Rollouts, learner: Learner) -> Sampled:
    """Sample the groups of one step with the current policy, for the next problems of the training stream.

    The learner's position in the stream does not change here, so a step whose rollouts failed samples the
    same problems again.
    """
    clock = Clock()
    grpo = rollouts.recipe.grpo
    all_groups: list[Group] = []
    rollouts.generator.update_weights(learner.policy.named_tensors())

    def sample_batch() -> list[Group]:
        batch = rollouts.draw(learner.state.next_problem + len(all_groups))
        all_groups.extend(batch)
        return batch

    if grpo.use_dynamic_sampling:
        threshold, max_batches = rollouts.recipe.loss_fn.resampling(grpo.dynamic_sampling_max_gen_batches)
        accumulated = accumulate_groups(
            sample_batch,
            partial(Group.has_signal, drop_truncated=grpo.overlong_filtering),
            num_groups=grpo.num_prompts_per_step,
            valid_fraction_threshold=threshold,
            max_draws=max_batches,
        )
        groups = list(accumulated.take(grpo.num_prompts_per_step))
    else:
        groups = sample_batch()
    clock.lap("time/rollout")
    return Sampled(groups, all_groups, clock)


def demonstrate(rollouts: Rollouts, learner: Learner) -> Sampled:
    """Take the demonstrations of the next problems. Each one is a group of its own."""
    assert rollouts.demonstrations is not None
    clock = Clock()
    demonstration = rollouts.demonstrations.training
    first = learner.state.next_problem
    numbers = range(first, first + rollouts.recipe.grpo.num_prompts_per_step)
    groups = from_first_rank(lambda: [demonstration(number) for number in numbers])
    clock.lap("time/data")
    return Sampled(groups, groups, clock)


def reinforce(learner: Learner, sampled: Sampled, diagnostics: StepDiagnostics) -> Row:
    """Train on sampled groups: shape the rewards, score the tokens and update the policy.

    Args:
        learner: Learner to train. Its position in the stream of problems moves on.
        sampled: Result of `sample`.
        diagnostics: Measures the tokens of some steps.

    Returns:
        Metrics of the step.
    """
    recipe = learner.recipe
    state = learner.state
    clock = sampled.clock
    step = shape(assemble(sampled.groups), recipe)
    prepared, updates = learner.learn(step, clock)
    state.next_problem += len(sampled.all_groups)
    warning = implausible_advantage(prepared)
    if warning:
        log.warning("step %d: %s", state.step, warning)

    row: Row = {"step": state.step, "rollout/num_prompts": len(sampled.all_groups)}
    row |= {name: float(value) for name, value in prepared.metrics.items()}
    row |= mean_scores(sampled.groups, sampled.all_groups)
    row |= signal_shares(sampled.all_groups, drop_truncated=recipe.grpo.overlong_filtering)
    if recipe.grpo.use_dynamic_sampling:
        # Metrics of rewards and lengths describe the policy, so they must include the groups without a
        # signal, which were dropped. The metrics of the trained groups alone are renamed to kept/*.
        of_all_groups = sampled_metrics(shape(assemble(sampled.all_groups), recipe))
        row = as_kept(row) | of_all_groups | mean_scores(sampled.all_groups, sampled.all_groups)
    row |= mean_metrics(updates)
    row |= clock.laps
    if diagnostics.is_due(state.step):
        tokens = step.sequences.input_ids[:, 1:]
        row |= diagnostics.measure(learner.objective, prepared, tokens, state.step)
    return row | totals(learner, step, clock) | {"steps/no_signal": state.no_signal}


def supervise(learner: Learner, sampled: Sampled, _diagnostics: StepDiagnostics) -> Row:
    """Make one update on demonstrations, and return the metrics of the step."""
    state = learner.state
    clock = sampled.clock
    step = assemble(sampled.groups)
    # A supervised loss does not read previous logprobs. The demonstrations' zeros take their place.
    prepared = learner.prepare(step, Scores(step.generation_logprobs))
    updates = learner.update(prepared, step)
    clock.lap("time/update")
    state.count(updates, int(step.token_mask.sum()))
    state.next_problem += len(sampled.all_groups)

    lengths = step.token_mask.sum(1)
    row: Row = {"step": state.step} | mean_metrics(updates)
    row |= {"length/mean": float(lengths.double().mean()), "length/max": float(lengths.max())}
    return row | clock.laps | totals(learner, step, clock)


def shape(step: Step, recipe: Recipe) -> Step:
    """Apply the recipe's length penalty to the rewards, and mask truncated responses if the recipe says so.

    The reward of a masked response still counts in the mean and deviation of its group.
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
    """Return the time and the token rate of a step, and the counters of the run."""
    seconds = sum(clock.laps.values())
    return {
        "time/step": seconds,
        "tokens_per_second": float(step.token_mask.sum()) / seconds,
        "steps/skipped": learner.state.skipped,
        "tokens/trained": learner.state.tokens,
    }
