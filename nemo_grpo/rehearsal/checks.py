"""Proof that each stage of a rehearsal did its work: numbers of the run, each with its bound.

A stage with nothing to compare fails.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from nemo_grpo.rehearsal import overrides as small
from nemo_grpo.rehearsal.export import bridges_export, compare_folders, compare_with_base, convert
from nemo_grpo.rehearsal.reward_checks import rewards, validation
from nemo_grpo.rehearsal.run_output import Recorded, Row, num_tokens
from nemo_grpo.rehearsal.stages import Failed, Rehearsal, fail_if, metrics, newest_checkpoint

log = logging.getLogger(__name__)

REFIT_BOUND = 1e-3
"""Largest healthy gen_kl_error of a rehearsal, tighter than a job's: both sides compute in BF16 on one CPU,
which gave 1e-7 to 6e-4. Old weights gave 3e-3 to 5e-2, depending on how far an update moves the policy."""
AT_THE_CUT = 0.02
"""Share of tokens at which BF16 may move a token across top_p; the remaining tokens' logprobs then differ by
up to -log(top_p)."""
MOVED = 1e-3
"""Distance of a ratio from 1 that only an update within the step explains."""


@dataclass(frozen=True)
class Stage:
    """Result of one stage, a row of the report's table.

    Attributes:
        name: the stage's name, a key of `CHECKS`.
        ok: True if the stage has passed.
        proof: the numbers that prove it, or the reason for its failure.
    """

    name: str
    ok: bool
    proof: str


def stages(rehearsal: Rehearsal, failure: str | None = None) -> list[Stage]:
    """Check all stages, in order.

    Args:
        rehearsal: a rehearsal whose training has finished or failed.
        failure: reason why training did not finish, or None. The stages are checked anyway, but the list ends
            with the first that fails, which shows this reason; nothing is exported.
    """
    recorded = Recorded(rehearsal)
    names = SUPERVISED if recorded.is_supervised else tuple(CHECKS)
    if failure is not None:
        names = tuple(name for name in names if name not in AFTER_TRAINING)
    judged_stages = [judged(name, CHECKS[name], recorded) for name in names]
    if failure is None:
        return judged_stages
    # If every stage so far has passed, the last one shows the reason.
    number = len(judged_stages) - 1
    for position, stage in enumerate(judged_stages):
        if not stage.ok:
            number = position
            break
    failed_stage = Stage(judged_stages[number].name, False, failure)
    return [*judged_stages[:number], failed_stage]


def judged(name: str, check: Callable[[Recorded], str], recorded: Recorded) -> Stage:
    """Run the check of one stage; an error means that the stage failed."""
    try:
        return Stage(name, True, check(recorded))
    except Failed as failure:
        return Stage(name, False, str(failure))
    except Exception as error:
        # Unreadable output proves nothing about this stage, but the other stages can still be checked.
        log.exception("stage %s", name)
        return Stage(name, False, f"its evidence cannot be read: {error!r}")


def setup(run: Recorded) -> str:
    """Prove that the workers started: at least one step was trained."""
    rehearsal = run.rehearsal
    fail_if(not run.steps, "no step was trained")
    sampler = "vLLM" if rehearsal.stack.vllm_python else "the stand-in sampler"
    trainer = "NeMo-RL's supervised training" if run.is_supervised else f"rollouts by {sampler}"
    return f"{rehearsal.layout.number} policy worker(s), {rehearsal.layout}; {trainer}"


def refit(run: Recorded) -> str:
    """Prove that rollouts come from the trained weights, also after updates."""
    errors = run.series("mismatch/kl")
    ratio = max(run.series("train/token_mult_prob_error"), default=math.nan)
    proof = f"gen_kl_error {_listed(errors, '.1e')}; token_mult_prob_error at most {ratio:.4f}"
    fail_if(len(errors) < max(len(run.steps), 1), f"{proof}; not logged in every step")
    lengths = run.series("length/mean")
    fail_if(not all(lengths), f"{proof}; mean lengths {lengths}: without tokens nothing is compared")

    generation = run.recipe.policy.generation
    bound = REFIT_BOUND
    filters = generation.top_p < 1 or generation.top_k
    if filters and run.recipe.policy_is_scored:
        # Both sides filter, and BF16 may keep a token on one side only, see `AT_THE_CUT`. The other logprobs
        # then differ by -log(top_p), which changes the error by k3 of that: 1 / top_p - 1 + log(top_p).
        bound += AT_THE_CUT * (1 / generation.top_p - 1 + math.log(generation.top_p))
        errors = [_error_within_both_sets(run.responses(step)) for step in sorted(run.steps)]
        proof += f"; of tokens within both sides' top_p and top_k {_listed(errors, '.1e')}"

    is_synchronous = not run.recipe.rollouts_ahead
    if is_synchronous:
        fail_if(not all(error <= bound for error in errors), f"{proof}; the bound is {bound:.2g}")
        return f"{proof} (bound {bound:.2g})"
    first_step_fits = all(error <= bound for error in errors[:1])
    fail_if(not first_step_fits, f"{proof}; the bound of the first step is {bound:.2g}")
    return f"{proof}; later steps have no bound: asynchronous rollouts may be of older weights"


def _listed(numbers: Sequence[float], form: str) -> str:
    """Write numbers in one format, separated by commas."""
    return ", ".join(f"{number:{form}}" for number in numbers)


def _error_within_both_sets(rows: Sequence[Row]) -> float:
    """Compute gen_kl_error without the tokens that top_p and top_k cut on the policy's side only."""
    policy = torch.tensor([row["prev_logprobs"][0] for row in rows])
    sampled = torch.tensor([row["generation_logprobs"][0] for row in rows])
    counts = torch.tensor([row["token_loss_mask"][0] for row in rows]).bool()
    # NeMo-RL gives a token that the policy's filter cuts the logprob 0.
    is_cut_for_policy = (policy == 0) & (sampled != 0)
    difference = (policy - sampled)[counts & ~is_cut_for_policy].double()
    return float((difference.exp() - difference - 1).mean())


def rollout(run: Recorded) -> str:
    """Prove that every response is recorded, that its length is possible, and that it agrees with the log."""
    cut_shares = run.series("train/truncation_rate")
    number = run.recipe.num_sequences_per_step
    limit = run.recipe.policy.max_total_sequence_length
    responses = {step: run.responses(step) for step in run.steps}
    counts = {step: len(rows) for step, rows in responses.items()}
    fail_if(set(counts.values()) != {number}, f"responses recorded by step: {counts}; {number} are sampled")
    fail_if(min(counts) != 1, f"the first step is not logged, but step {min(counts)}")

    lengths_by_step = {step: [num_tokens(row) for row in rows] for step, rows in responses.items()}
    shortest = min(min(lengths) for lengths in lengths_by_step.values())
    longest = max(max(lengths) for lengths in lengths_by_step.values())
    cut_share = fmean(cut_shares or [0.0])
    proof = f"{number} responses a step, {shortest} to {longest} tokens, {cut_share:.0%} cut"
    fail_if(not 0 < shortest <= longest < limit, f"{proof}; 1 to {limit - 1} are possible")

    for step, lengths in lengths_by_step.items():
        logged = run.steps[step]
        if run.keeps_a_part:
            disagreement = _other_tokens(responses[step], logged, run.recipe.num_updates_per_step)
        else:
            disagreement = _other_mean(lengths, logged)
        fail_if(bool(disagreement), f"{proof}; in step {step} {disagreement}")
    return proof


def _other_mean(lengths: Sequence[int], logged: Mapping[str, float]) -> str:
    """Return how the mean of the recorded lengths differs from the logged mean, or "" if it agrees."""
    recorded_mean = fmean(lengths)
    logged_mean = logged.get("length/mean", math.nan)
    if math.isclose(logged_mean, recorded_mean, rel_tol=1e-4):
        return ""
    return f"{recorded_mean:.2f} in the mean, but {logged_mean:.2f} is logged"


def _other_tokens(rows: Sequence[Row], logged: Mapping[str, float], num_updates: int) -> str:
    """Return how the recorded tokens differ from those that the loss counted, or "" if they agree.

    Under dynamic sampling the record holds only the responses that were kept, while NeMo-RL's mean length is
    that of the whole last draw. The loss counts the recorded responses. NeMo-RL logs its count as a mean over
    the step's microbatches. Updates may have different numbers of microbatches, so this mean lies somewhere
    between the smallest and the largest count of an update.
    """
    trained = [num_tokens(row) * row["sample_loss_mask"][0] for row in rows]
    size = len(trained) // num_updates
    totals = [sum(trained[start : start + size]) for start in range(0, len(trained), size)]
    logged_tokens = logged.get("train/global_valid_toks", math.nan)
    # The logged number is a mean, so it is rounded.
    if min(totals) - 0.01 <= logged_tokens <= max(totals) + 0.01:
        return ""
    return f"{_listed(totals, 'g')} tokens an update, but {logged_tokens:g} are logged"


def update(run: Recorded) -> str:
    """Prove that loss and gradient are finite, groups have signal, and a step moves the weights."""
    losses = run.series("loss/total")
    norms = run.series("grad_norm")
    # Supervised training has many steps, of which a few are printed.
    some_steps = slice(None, None, max(1, len(losses) // small.NUM_STEPS))
    proof = f"loss {_listed(losses[some_steps], '.4f')}; gradient norm {_listed(norms[some_steps], '.3f')}"
    fail_if(not all(map(math.isfinite, [*losses, *norms])), proof)
    if not run.is_supervised:
        shares = _shares_with_signal(run)
        proof += f"; groups with signal {_listed(shares, '.0%')}"
        fail_if(not any(shares), f"{proof}: the rewards within each group are equal, so nothing is learnt")
    # NeMo-RL logs the norm of a step's last update, which may have no signal although an earlier one had.
    ratios = run.series("train/probs_ratio_max")
    has_moved = any(norms) or any(abs(ratio - 1) > MOVED for ratio in ratios)
    fail_if(not has_moved, f"{proof}: no step moved the weights")
    return proof


def _shares_with_signal(run: Recorded) -> list[float]:
    """Find the share of each step's groups in which rewards differ."""
    if not run.recipe.loss_fn.is_stock:
        return run.series("groups/valid_fraction")
    # NeMo-RL's asynchronous trainer logs no share, but it records the advantages.
    group_size = run.recipe.grpo.num_generations_per_prompt
    return [_share_with_signal(run.responses(step), group_size) for step in sorted(run.steps)]


def _share_with_signal(rows: Sequence[Row], group_size: int) -> float:
    """Compute the share of groups in which a response has an advantage other than 0."""
    has_advantage = [any(row["advantages"][0]) for row in rows]
    groups = [has_advantage[start : start + group_size] for start in range(0, len(rows), group_size)]
    return fmean(any(group) for group in groups)


def checkpoint(run: Recorded) -> str:
    """Prove that the newest checkpoint is the last step's and has the side files."""
    newest = newest_checkpoint(run.rehearsal)
    side_files = newest / "policy" / "tokenizer"
    fail_if(not (side_files / "config.json").is_file(), f"{newest} has no config.json and tokenizer")
    last_step = max(run.steps, default=0)
    fail_if(newest.name != f"step_{last_step}", f"{newest} is the newest, but step {last_step} was trained")
    return f"{newest.name}, with config.json and tokenizer"


def stop_and_resume(run: Recorded) -> str:
    """Prove that the run was stopped and resumed without losing or repeating a step of the log."""
    stop = run.rehearsal.stopped_after
    logged = [int(row["step"]) for row in metrics(run.recipe) if "loss/total" in row]
    expected = list(range(1, small.num_steps(run.recipe) + 1))
    fail_if(
        logged != expected,
        f"steps {logged} are logged; each of {expected[0]} to {expected[-1]} once is expected",
    )
    return f"SIGUSR1 in step {stop}: exit 75; started again at step {stop + 1}: exit 0"


def export(run: Recorded) -> str:
    """Prove that the exported weights have moved, and equal Bridge's export where Bridge has one."""
    rehearsal = run.rehearsal
    source = newest_checkpoint(rehearsal)
    converted = convert(rehearsal, source)
    proof = f"{source.name} in {rehearsal.seconds.get('conversion', 0.0):.1f} s; "
    proof += compare_with_base(converted, rehearsal.model.folder)
    if run.recipe.policy.megatron_cfg.lora_in_use:
        return f"{proof}, adapters merged"
    return f"{proof}; {compare_folders(converted, bridges_export(rehearsal, source))}"


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
