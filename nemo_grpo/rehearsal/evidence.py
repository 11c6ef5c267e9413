"""Evidence that each stage of a rehearsal did its work: numbers of the run, each with its bound."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from nemo_grpo.nemorl.rollout_error import bound, per_update
from nemo_grpo.rehearsal import recipe as small
from nemo_grpo.rehearsal.problems import RehearsedTask
from nemo_grpo.rehearsal.stages import Failed, Rehearsal, metrics, newest_checkpoint, run_python
from nemo_grpo.tasks import Problem
from nemo_grpo.tasks.base import reward_of
from nemo_grpo.tasks.scoring import Scorer

REFIT_BOUND = 4e-4
"""Largest healthy gen_kl_error of a rehearsal, tighter than a job's: both sides compute in BF16 on one CPU,
which gave 1e-7 to 2e-4. Old weights gave 3e-3 to 5e-2, depending on how far an update moves the policy;
hidden states divided by the temperature gave 5e-4 to 4e-3."""
WORKER_TOLERANCE = 0.015
"""Largest mean difference of logprobs, exported model in float32 against the BF16 worker, nats: rounding gave
0.002 to 0.004, hidden states divided by the temperature 0.016 to 0.036."""
SAMPLE_LENGTH = 300


@dataclass(frozen=True)
class Stage:
    """A row of the table.  Attributes: name; ok; proof: numbers, or the reason why not."""

    name: str
    ok: bool
    proof: str


class Evidence:
    """A rehearsal's output, read once."""

    def __init__(self, rehearsal: Rehearsal) -> None:
        self.rehearsal = rehearsal
        self.recipe = rehearsal.small

    @cached_property
    def steps(self) -> dict[int, dict[str, float]]:
        """Metrics by step."""
        found: dict[int, dict[str, float]] = {}
        for row in metrics(self.recipe):
            found.setdefault(int(row["step"]), {}).update(row)
        return {step: row for step, row in found.items() if "loss/total" in row}

    def series(self, name: str) -> list[float]:
        """One metric's values in the order of steps."""
        return [row[name] for _, row in sorted(self.steps.items()) if name in row]

    def responses(self, step: int) -> list[dict[str, Any]]:
        """NeMo-RL's record of a step's responses."""
        files = sorted(Path(str(self.recipe.logger.log_dir)).glob(f"exp_*/train_data_step{step}.jsonl"))
        return [json.loads(line) for line in files[-1].read_text().splitlines()] if files else []

    @cached_property
    def scored(self) -> list[tuple[Problem, str, Mapping[str, float]]]:
        """The run's responses with their problems and scores, if the prompt identifies the problem."""
        settings = self.rehearsal.taught.nemo_grpo
        task = RehearsedTask(self.rehearsal.taught, self.rehearsal.problems.task)
        has_turns = hasattr(task.task, "observe")
        by_length = sorted(task.known, key=lambda problem: -len(problem.question))
        found: list[tuple[Problem, str]] = []
        for step in sorted(self.steps):
            for row in self.responses(step):
                prompt, *turns = row["content"][0] if isinstance(row["content"][0], list) else row["content"]
                problem = next((p for p in by_length if p.question in prompt), None)
                if problem is not None:  # after the last turn NeMo-RL's environments say whether it was right
                    found.append((problem, "".join(turns if has_turns else turns[:1])))
        scorer = Scorer(task, settings.rewards, settings.prompt)
        try:
            scores = scorer([problem for problem, _ in found], [response for _, response in found])
        finally:
            scorer.close()
        return [(*one, score) for one, score in zip(found, scores, strict=True)]


def stages(rehearsal: Rehearsal, failure: str | None = None) -> list[Stage]:
    """All stages, in order.

    Args: failure: why training did not finish. Its output is judged anyway; the first stage that lacks
          something shows the reason, and nothing is exported.
    """
    evidence = Evidence(rehearsal)
    names = SUPERVISED if rehearsal.recipe.loss_fn.learns_from_demonstrations else tuple(CHECKS)
    checks = {name: CHECKS[name] for name in names if failure is None or name != "export"}
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


def _refuse(fails: bool, reason: str) -> None:
    if fails:
        raise Failed(reason)


def setup(evidence: Evidence) -> str:
    r = evidence.rehearsal
    engine = "vLLM" if r.stack.vllm_python else "the stand-in sampler"
    _refuse(not evidence.steps, "no step was trained")
    if r.recipe.loss_fn.learns_from_demonstrations:
        return f"{r.layout.number} policy worker(s), {r.layout}; NeMo-RL's supervised training"
    return f"{r.layout.number} policy worker(s), {r.layout}; rollouts by {engine}"


def refit(evidence: Evidence) -> str:
    """Rollouts come from the trained weights, also after updates."""
    recipe = evidence.recipe
    errors = [per_update(recipe, error) for error in evidence.series("mismatch/kl")]
    ratio = max(evidence.series("train/token_mult_prob_error"), default=math.nan)
    shown = f"gen_kl_error {', '.join(f'{e:.1e}' for e in errors)}; token_mult_prob_error at most {ratio:.4f}"
    if bound(recipe) is None:
        return f"{shown}; no bound: asynchronous rollouts may be of older weights"
    _refuse(not errors or not all(e <= REFIT_BOUND for e in errors), f"{shown}; the bound is {REFIT_BOUND:g}")
    return f"{shown} (bound {REFIT_BOUND:g})"


def rollout(evidence: Evidence) -> str:
    lengths, cut = evidence.series("length/mean"), evidence.series("train/truncation_rate")
    _refuse(not lengths, "no responses are logged")
    return f"mean length {fmean(lengths):.1f} tokens, {fmean(cut or [0.0]):.0%} truncated"


def reward(evidence: Evidence) -> str:
    """The recipe's rewards on the responses of the run, component by component."""
    components = reward_components(evidence)
    means = evidence.series("reward/mean")
    shown = f"mean {', '.join(f'{mean:.3f}' for mean in means)}; {_shown(components)}"
    _refuse(not all(map(math.isfinite, means)), shown)
    return shown


def advantage(evidence: Evidence) -> str:
    shares = evidence.series("groups/valid_fraction")
    if evidence.recipe.loss_fn.is_stock:
        shares = [percent / 100 for percent in evidence.series("baseline_reward/pct_mixed")]
    shown = f"groups with signal {', '.join(f'{share:.0%}' for share in shares)}"
    _refuse(not any(shares), f"{shown}: every response of a group gets the same reward, so nothing is learnt")
    return shown


def update(evidence: Evidence) -> str:
    losses, norms = evidence.series("loss/total"), evidence.series("grad_norm")
    few = slice(None, None, max(1, len(losses) // small.NUM_STEPS))
    shown = f"loss {', '.join(f'{x:.4f}' for x in losses[few])}; "
    shown += f"gradient norm {', '.join(f'{x:.3f}' for x in norms[few])}"
    _refuse(not all(map(math.isfinite, [*losses, *norms])), shown)
    _refuse(not any(norms), f"{shown}: no step moved the weights")
    return shown


def validation(evidence: Evidence) -> str:
    if not evidence.rehearsal.recipe.grpo.validates:
        return "the recipe has none"
    name = "val_loss" if evidence.recipe.loss_fn.learns_from_demonstrations else "accuracy"
    key = f"validation/{name}"
    found = [row[key] for row in metrics(evidence.recipe) if key in row]
    _refuse(not found, f"no {key} is logged")
    return f"{name} {found[-1]:.3f} of {small.NUM_VALIDATION} problems"


def checkpoint(evidence: Evidence) -> str:
    newest = newest_checkpoint(evidence.rehearsal)
    side = newest / "policy" / "tokenizer"
    _refuse(not (side / "config.json").is_file(), f"{newest} has no config.json and tokenizer")
    return f"{newest.name}, with config.json and tokenizer"


def stop_and_resume(evidence: Evidence) -> str:
    done, stop = sorted(evidence.steps), evidence.rehearsal.stopped_after
    _refuse(done != list(range(1, small.num_steps(evidence.recipe) + 1)), f"steps {done} are logged")
    return f"SIGUSR1 in step {stop}: exit 75; started again at step {stop + 1}: exit 0"


def export(evidence: Evidence) -> str:
    """Compare the converters' export of the stop's checkpoint with Bridge's and with the resumed worker."""
    rehearsal = evidence.rehearsal
    if rehearsal.problems.task.needs_images:
        return "left out: the converters do not support vision models"
    step = evidence.recipe.checkpoint_dir / f"step_{small.STOP_AFTER}"
    source = step if step.is_dir() else newest_checkpoint(rehearsal)
    ours = _convert(rehearsal, source)
    found = [f"{source.name} in {rehearsal.seconds['conversion']:.1f} s"]
    if evidence.recipe.policy.megatron_cfg.lora_in_use is None:
        theirs = rehearsal.folder / "hf-of-bridge"
        (weights,) = (source / "policy" / "weights").glob("iter_*")
        with rehearsal.timed("Bridge's export"):
            folders = map(str, (rehearsal.model.folder, weights, theirs))
            run_python(rehearsal, ["-m", "nemo_grpo.rehearsal.export", *folders], "bridge.log")
        found.append(compare_folders(ours, theirs))
    rows = evidence.responses(small.STOP_AFTER + 1) if source == step else []
    if rows:
        found.append(compare_with_worker(ours, rows, evidence.recipe.policy.generation.temperature))
    return "; ".join(found)


def _convert(rehearsal: Rehearsal, checkpoint: Path) -> Path:
    output = rehearsal.folder / "hf"
    arguments = ["-m", "checkpoints_conv", "megatron-to-hf", "--megatron-checkpoint", str(checkpoint)]
    arguments += ["--hf-config", str(checkpoint / "policy" / "tokenizer"), "--output", str(output), "--force"]
    if rehearsal.small.policy.megatron_cfg.lora_in_use:
        arguments += ["--lora", "merge", "--base", str(rehearsal.model.folder)]
    with rehearsal.timed("conversion"):
        run_python(rehearsal, arguments, "conversion.log")
    return output


def compare_folders(ours: Path, theirs: Path) -> str:
    """Check that two Hugging Face folders hold the same model.

    Raises: Failed: a name is missing, or a weight differs in any bit.
    """
    import torch
    from transformers import AutoModelForCausalLM

    models = [AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval() for path in (ours, theirs)]
    mine, other = (model.state_dict() for model in models)
    _refuse(set(mine) != set(other), f"other names than Bridge's: {sorted(set(mine) ^ set(other))[:5]}")
    different = [name for name in mine if not torch.equal(mine[name], other[name])]
    _refuse(bool(different), f"weights differ from Bridge's: {different[:5]}")
    tokens = torch.arange(3, 35)[None]
    with torch.no_grad():
        logits = [model(tokens).logits for model in models]
    _refuse(not torch.equal(*logits), "logits differ from those of Bridge's export")
    return f"{len(mine)} weights and the logits equal those of Megatron-Bridge's export, bit for bit"


def compare_with_worker(folder: Path, rows: list[dict[str, Any]], temperature: float) -> str:
    """Check that transformers reproduces the worker's logprobs on the resumed run's responses.

    Raises: Failed: they differ by more than BF16 rounding.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    differences = []
    for row in rows:
        length = row["input_lengths"][0]
        ids = torch.tensor(row["token_ids"][0][:length])[None]
        with torch.no_grad():
            logprobs = torch.log_softmax(model(ids).logits[0, :-1] / temperature, -1)
        mine = logprobs.gather(1, ids[0, 1:, None])[:, 0]
        trains = torch.tensor(row["token_loss_mask"][0][:length])[1:].bool()
        differences += (mine - torch.tensor(row["prev_logprobs"][0][:length])[1:])[trains].abs().tolist()
    shown = f"logprobs {fmean(differences):.4f} from the worker's in the mean, at most {max(differences):.4f}"
    _refuse(fmean(differences) > WORKER_TOLERANCE, f"{shown}; {WORKER_TOLERANCE} is allowed")
    return shown


CHECKS: dict[str, Callable[[Evidence], str]] = {
    "setup": setup,
    "refit": refit,
    "rollout": rollout,
    "reward": reward,
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


# ---------------------------------------------------------------------- responses


def reward_components(evidence: Evidence) -> dict[str, float]:
    """Mean of each component that the recipe weights, over the run's responses."""
    scores = [score for _, _, score in evidence.scored]
    weights = evidence.rehearsal.recipe.nemo_grpo.rewards
    return {name: fmean(score[name] for score in scores) for name in weights} if scores else {}


def _shown(components: Mapping[str, float]) -> str:
    return (
        ", ".join(f"{name} {mean:.2f}" for name, mean in components.items()) or "no response was recognised"
    )


def sample(evidence: Evidence) -> str:
    """One response with its reward; the best one."""
    weights = evidence.rehearsal.recipe.nemo_grpo.rewards
    found = max(evidence.scored, key=lambda one: reward_of(one[2], weights), default=None)
    if found is None:
        return ""
    problem, response, score = found
    shown = re.sub(r"\s+", " ", response)[:SAMPLE_LENGTH]
    question = re.sub(r"\s+", " ", problem.question)[:SAMPLE_LENGTH]
    return f"{question!r} -> {shown!r}: reward {reward_of(score, weights):g} ({_shown(score)})"
