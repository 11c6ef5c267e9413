"""Steps of training: of the algorithm, on sampled responses; or supervised, on demonstrations."""

import logging
from dataclasses import replace
from functools import partial
from typing import Any

from nemo_grpo.core.advantages import implausible_advantage, overlong_penalty
from nemo_grpo.core.batch import PreparedBatch
from nemo_grpo.core.objective import as_kept
from nemo_grpo.core.random import step_seed
from nemo_grpo.core.resampling import accumulate_groups
from nemo_grpo.engine.megatron.microbatches import Scores
from nemo_grpo.engine.rollout import Group, Step, assemble, sample_groups
from nemo_grpo.engine.setup import Parts
from nemo_grpo.engine.step_metrics import (
    Clock,
    drawn_metrics,
    mean_metrics,
    mean_scores,
    sample_rows,
    signal_shares,
)
from nemo_grpo.recipe import Recipe
from nemo_grpo.report.tokens import token_diagnostics
from nemo_grpo.sampling.requests import Request
from nemo_grpo.support.distributed import from_first_rank

log = logging.getLogger(__name__)
Row = dict[str, Any]


def reinforce(parts: Parts) -> Row:
    """Take one step of the algorithm: draw, sample, score, shape, update; returns its metrics."""
    clock, state, filtering = Clock(), parts.state, parts.recipe.grpo.overlong_filtering
    parts.generator.update_weights(parts.policy.named_tensors())
    with parts.saved_before_failure():
        groups, drawn = sample(parts)
    clock.lap("time/rollout")
    step = shape(assemble(groups), parts.recipe)
    prepared, updates = parts.learner.learn(step, clock)
    if warning := implausible_advantage(prepared):
        log.warning("step %d: %s", state.step, warning)

    row: Row = {"step": state.step, "rollout/num_prompts": len(drawn)}
    row |= {name: float(value) for name, value in prepared.metrics.items()}
    row |= mean_scores(groups) | signal_shares(drawn, drop_truncated=filtering)
    if parts.recipe.grpo.use_dynamic_sampling:  # the groups that were dropped were rolled out, too
        row = as_kept(row) | drawn_metrics(shape(assemble(drawn), parts.recipe)) | mean_scores(drawn)
    row |= mean_metrics(updates) | clock.laps | diagnose(parts, prepared, step)
    number = parts.recipe.nemo_grpo.engine.log_samples
    parts.folder.append_samples(sample_rows(state.step, groups, number, parts.tokenizer))
    return row | totals(parts, step, clock) | {"steps/no_signal": state.no_signal}


def supervise(parts: Parts) -> Row:
    """Take one update on the next demonstrations; returns its metrics."""
    clock, state, number = Clock(), parts.state, parts.recipe.grpo.num_prompts_per_step
    assert parts.demonstrations is not None
    training, first = parts.demonstrations.training, state.next_problem
    with parts.saved_before_failure():
        groups = from_first_rank(lambda: [training(index) for index in range(first, first + number)])
    step = assemble(groups)
    state.next_problem += number
    clock.lap("time/data")
    prepared = parts.learner.prepare(step, Scores(step.generation_logprobs))
    updates = parts.learner.update(prepared, step)
    clock.lap("time/update")
    state.count(updates, int(step.token_mask.sum()))

    lengths = step.token_mask.sum(1)
    row: Row = {"step": state.step} | mean_metrics(updates)
    row |= {"length/mean": float(lengths.double().mean()), "length/max": float(lengths.max())}
    return row | clock.laps | totals(parts, step, clock)


# ------------------------------------------------------------------ sampling


def sample(parts: Parts) -> tuple[list[Group], list[Group]]:
    """Sample the groups of one step; returns them, and all that were drawn for them."""
    grpo, drawn = parts.recipe.grpo, list[Group]()
    if not grpo.use_dynamic_sampling:
        drawn = draw(parts)
        return drawn, drawn

    def draw_more() -> list[Group]:
        groups = draw(parts)
        drawn.extend(groups)
        return groups

    threshold, max_draws = parts.recipe.loss_fn.resampling(grpo.dynamic_sampling_max_gen_batches)
    gathered = accumulate_groups(
        draw_more,
        partial(Group.has_signal, drop_truncated=grpo.overlong_filtering),
        num_groups=grpo.num_prompts_per_step,
        valid_fraction_threshold=threshold,
        max_draws=max_draws,
    )
    return list(gathered.take(grpo.num_prompts_per_step)), drawn


def draw(parts: Parts) -> list[Group]:
    """Sample and score the responses to the next ``num_prompts_per_step`` problems."""
    grpo, first = parts.recipe.grpo, parts.state.next_problem
    problems = [
        parts.task.train_problem(number, grpo.seed)
        for number in range(first, first + grpo.num_prompts_per_step)
    ]
    prompts, seed = parts.encode(problems), step_seed(grpo.seed, first)
    request = Request(prompts, grpo.num_generations_per_prompt, parts.sampling, seed)
    parts.state.next_problem += len(problems)
    return sample_groups(parts.generator, parts.tokenizer, parts.scorer, problems, request)


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


# ------------------------------------------------------------------ records


def totals(parts: Parts, step: Step, clock: Clock) -> Row:
    """Return a step's time and rate, and the run's counters."""
    seconds, state = sum(clock.laps.values()), parts.state
    return {
        "time/step": seconds,
        "tokens_per_second": float(step.token_mask.sum()) / seconds,
        "steps/skipped": state.skipped,
        "tokens/trained": state.tokens,
    }


def diagnose(parts: Parts, prepared: PreparedBatch, step: Step) -> dict[str, float]:
    """Write token diagnostics every `diagnostics_period` steps, and return their metrics."""
    period, number = parts.recipe.nemo_grpo.engine.diagnostics_period, parts.state.step
    if not parts.folder.leads or period == 0 or (number > 1 and number % period > 0):
        return {}
    tokens, tokenizer = step.sequences.input_ids[:, 1:], parts.tokenizer
    numbers, details = token_diagnostics(
        parts.learner.objective, prepared, tokens, lambda token: str(tokenizer.decode([token]))
    )
    parts.folder.append_diagnostics({"step": number} | details)
    return numbers
