"""Recomputes one rehearsed step with float32 transformers and the variant, without NeMo-RL and Megatron.

Weights are on disk for the first step, the rehearsal's model, and for those after a checkpoint that is still
there, its export. From the recorded tokens and rewards follow the advantages, the loss and
the norm of its gradient, which a wrong normalisation changes even where Adam hides it.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import NamedTuple

import torch
from adapters import adapters_of
from torch import Tensor

from nemo_grpo.core.batch import TokenBatch, global_counts
from nemo_grpo.core.random import response_ids, step_seed
from nemo_grpo.nemorl.checkpoints import CARRIED
from nemo_grpo.rehearsal import overrides as small
from nemo_grpo.rehearsal import vision
from nemo_grpo.rehearsal.export import convert, load
from nemo_grpo.rehearsal.run_output import Recorded, reward
from nemo_grpo.rehearsal.stages import Failed, newest_checkpoint
from nemo_grpo.report.stuck import SIGNAL


class Run(Recorded):
    """A rehearsal's output with its checkpoints, exports and images."""

    @property
    def resumed_step(self):
        return self.rehearsal.stopped_after + 1

    @cached_property
    def stop_checkpoint(self):
        step = self.recipe.checkpoint_dir / f"step_{self.rehearsal.stopped_after}"
        return step if step.is_dir() else newest_checkpoint(self.rehearsal)

    @cached_property
    def exported(self):
        return convert(self.rehearsal, self.stop_checkpoint, "hf-of-stop")

    def checkpoint_before(self, step):
        """The checkpoint that a step started from; training may have removed it."""
        return self.recipe.checkpoint_dir / f"step_{step - 1}"

    def export_of(self, checkpoint):
        if checkpoint == self.stop_checkpoint:
            return self.exported
        return convert(self.rehearsal, checkpoint, f"hf-{checkpoint.name}")

    def images_of(self, rows):
        """What the model sees of the images of each response's problem; None for tasks without images."""
        if not self.rehearsal.stack.sees_images:
            return None
        problems = [self._asked(self._conversation(row, False)[0], self.task.learnt_problems) for row in rows]
        if None in problems:
            raise Failed(f"the problem of response {problems.index(None)} is not recognised by its images")
        return [self.seen(problem) for problem in problems if problem is not None]

    @cached_property
    def _processor(self):
        from transformers import AutoProcessor

        return AutoProcessor.from_pretrained(self.rehearsal.model.folder)

    def seen(self, problem):
        return vision.encoded(self._processor, self.rehearsal.toy_recipe.nemo_grpo.prompt, problem)[1]


@dataclass(frozen=True)
class Recomputed:
    """What a step should have logged; advantages are [B, T], or None for demonstrations.

    The norm is the last update's before clipping, None where the files alone do not give it; ``scale`` is the
    mean absolute size of the loss's token terms.
    """

    step: int
    loss: float
    gradient_norm: float | None
    largest_norm: float
    advantages: Tensor | None
    recorded_advantages: Tensor | None
    scale: float


@dataclass(frozen=True)
class Sequences:
    """A step's tokens: ids [B, S], mask [B, S - 1]; seen: of each row's images, see `vision.encoded`."""

    ids: Tensor
    lengths: list[int]
    mask: Tensor
    seen: list[Mapping[str, Tensor]] | None = None

    def row(self, number):
        """A sequence without its padding, and its images, as `logprobs` takes them."""
        return self.ids[number, : self.lengths[number]], self.seen and self.seen[number : number + 1]


class Sampling(NamedTuple):
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None

    @classmethod
    def of(cls, recipe):
        given = recipe.policy.generation
        return cls(given.temperature, given.top_p, given.top_k)

    def cut(self, logits):
        """Logits [..., V] of the kept tokens, -inf for the others; the top_k first, then the nucleus."""
        if self.top_k is not None:
            logits = logits.masked_fill(logits < logits.topk(self.top_k).values[..., -1:], -math.inf)
        if self.top_p == 1.0:
            return logits
        each, order = logits.softmax(-1).sort(-1, descending=True)
        is_cut = torch.zeros_like(each, dtype=torch.bool)
        is_cut.scatter_(-1, order, each.cumsum(-1) - each >= self.top_p)
        return logits.masked_fill(is_cut, -math.inf)


def logprobs(model, ids, seen, sampling):
    """(logprob of every token but the first at the temperature, entropy there at temperature 1), [S - 1]."""
    images = vision.inputs_of(ids[None], model.config.image_token_id, seen) if seen else {}
    logits = model(ids[None], **images).logits[0, :-1].float()
    each = torch.log_softmax(logits, -1)
    sampled = torch.log_softmax(sampling.cut(logits / sampling.temperature), -1)
    return sampled.gather(1, ids[1:, None])[:, 0], -(each.exp() * each).sum(-1)


def all_logprobs(model, sequences, sampling):
    """`logprobs` of every sequence without gradient, each [B, S - 1], 0 behind a sequence's end."""
    found = torch.zeros(2, len(sequences.lengths), sequences.ids.shape[1] - 1)
    with torch.no_grad():
        for row, length in enumerate(sequences.lengths):
            found[:, row, : length - 1] = torch.stack(logprobs(model, *sequences.row(row), sampling))
    return found[0], found[1]


def sequences_of(run, rows):
    mask = torch.tensor([row["token_loss_mask"][0] for row in rows])[:, 1:].bool()
    return Sequences(
        ids=torch.tensor([row["token_ids"][0] for row in rows]),
        lengths=[int(row["input_lengths"][0]) for row in rows],
        mask=mask,
        seen=run.images_of(rows),
    )


def aligned(rows, name):
    """A recorded [B, S] tensor, whose index t speaks of token t, as [B, S - 1]."""
    return torch.tensor([row[name][0] for row in rows], dtype=torch.float32)[:, 1:]


def recompute(run, dtype=torch.float32):
    """A step that has a gradient, of those whose weights are on disk; the first or a resumed one rather."""
    recipe = run.recipe
    adapted, several = recipe.policy.megatron_cfg.lora_in_use, recipe.num_updates_per_step > 1
    steps = sorted(run.steps, key=lambda step: (step not in (1, run.resumed_step), step))
    if adapted:
        steps = [step for step in steps if step > 1]  # A is random before, and nowhere
    elif several:  # Adam has no state until a step has a signal
        steps = [step for step in sorted(steps) if run.steps[step].get(SIGNAL)][:1]
    tried = []
    for step in steps:
        if not several and not run.steps[step].get("grad_norm"):
            tried.append(f"step {step} moved no weight")
        elif step > 1 and not run.checkpoint_before(step).is_dir():
            tried.append(f"the checkpoint before step {step} is gone")
        else:
            return _recompute(run, step, dtype)
    raise Failed(f"nothing to recompute: {', '.join(tried) or 'no step has a signal'}")


def _recompute(run, step, dtype):
    recipe, adapted = run.recipe, run.recipe.policy.megatron_cfg.lora_in_use
    before = run.checkpoint_before(step) if step > 1 else None
    folder = run.export_of(before) if before else run.rehearsal.model.folder
    model, sampling = load(folder, dtype), Sampling.of(recipe)
    objective = recipe.loss_fn.build()
    if run.is_supervised:
        rows = []
        sequences, sampling = demonstrated(run, step), Sampling()
    elif not (rows := run.responses(step)):
        raise Failed(f"no responses of step {step} are recorded")
    else:
        sequences = sequences_of(run, rows)
    scored, entropies = all_logprobs(model, sequences, sampling)
    reference = None
    if objective.needs_reference:
        reference, _ = all_logprobs(load(run.rehearsal.model.folder, dtype), sequences, sampling)
    batch = _batch(rows, sequences, scored, recipe.grpo.num_generations_per_prompt)
    carried = (
        json.loads((before / CARRIED).read_text()) if before and recipe.loss_fn.carries_statistics else {}
    )
    batch = replace(batch, entropies=entropies, reference_policy_logprobs=reference, carried=carried)
    prepared = objective.prepare(batch, seed=step_seed(recipe.grpo.seed, step - 1))
    adapters = adapters_of(before, recipe.policy.megatron_cfg) if before and adapted else None
    loss, norms, scale = _updates(model, recipe, objective, prepared, sequences, sampling, adapters)
    written = prepared.folded() if recipe.uses_data_plane else prepared
    advantages = (written.advantages, aligned(rows, "advantages")) if rows else (None, None)
    return Recomputed(step, loss, norms[-1], max(norm or 0.0 for norm in norms), *advantages, scale)


def demonstrated(run, step):
    """A step's demonstrations; None: the validation's."""
    from transformers import AutoTokenizer

    from nemo_grpo.run.demonstrations import Demonstrations
    from nemo_grpo.run.groups import assemble

    recipe = run.recipe
    tokenizer = AutoTokenizer.from_pretrained(run.rehearsal.model.folder)
    task = recipe.task.build()
    shown = Demonstrations(recipe, task, tokenizer)
    number = recipe.grpo.num_prompts_per_step
    if step is None:
        groups = [shown.held_out(problem) for problem in task.validation_problems(small.NUM_VALIDATION)]
    else:
        groups = [shown.training(index) for index in range((step - 1) * number, step * number)]
    made = assemble(groups)
    return Sequences(made.sequences.input_ids, made.sequences.lengths.tolist(), made.token_mask)


def _batch(rows, sequences, scored, num_generations):
    number = len(sequences.lengths)
    always = torch.ones(number, dtype=torch.bool)
    batch = TokenBatch(
        prev_logprobs=scored,
        token_mask=sequences.mask,
        sample_mask=always,
        rewards=torch.zeros(number),
        group_ids=torch.arange(number),
    )
    if not rows:
        return batch
    return replace(
        batch,
        generation_logprobs=aligned(rows, "generation_logprobs"),
        sample_mask=torch.tensor([row["sample_loss_mask"][0] for row in rows]).bool(),
        rewarded=always,
        rewards=torch.tensor([reward(row) for row in rows]),
        group_ids=batch.group_ids // num_generations,
        response_ids=response_ids(_prompt_and_policy_tokens(sequences)),
    )


def _prompt_and_policy_tokens(sequences):
    for ids, mask in zip(sequences.ids, sequences.mask, strict=True):
        start = int(mask.int().argmax()) + 1  # mask[t] speaks of ids[t + 1]
        yield ids[:start].tolist(), ids[1:][mask].tolist()


def _updates(model, recipe, objective, prepared, sequences, sampling, adapters):
    """(mean loss of the updates, norm of each one's gradient, mean size of a loss's terms)."""
    number = len(sequences.lengths)
    chunks = torch.arange(number).chunk(max(recipe.num_updates_per_step, 1))
    adam, losses, sizes, norms = _adam(model, recipe), [], [], list[float | None]()
    for update, rows in enumerate(chunks):
        if update and adapters is None:
            clip = recipe.policy.megatron_cfg.optimizer.clip_grad or math.inf
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            adam.step()
        model.zero_grad()
        loss, size = _backward(model, objective, prepared, sequences, rows.tolist(), sampling)
        losses.append(loss)
        sizes.append(size)
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        if adapters is None:
            norms.append(math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values())))
        else:
            norms.append(adapters.gradient_norm(gradients) if len(chunks) == 1 else None)
    return fmean(losses), norms, fmean(sizes)


def _backward(model, objective, prepared, sequences, rows, sampling):
    """(loss of an update with these rows, size of its terms), a sequence at a time; leaves the gradient."""
    chosen = torch.tensor(rows)
    tokens, responses = global_counts(prepared.select(chosen).batch)
    total, size = 0.0, 0.0
    for row in rows:
        length = sequences.lengths[row]
        current, _ = logprobs(model, *sequences.row(row), sampling)
        part = prepared.select(torch.tensor([row]), next_token_logprobs=current[None], length=length - 1)
        loss, _ = objective.loss(part, global_valid_toks=tokens, global_valid_seqs=responses)
        loss.backward()
        total += float(loss.detach())
        size += abs(float(loss.detach()))
    return total, size


def _adam(model, recipe):
    """Megatron's: biases and norms do not decay."""
    given = recipe.policy.megatron_cfg.optimizer
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": given.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    betas = given.adam_beta1, given.adam_beta2
    return torch.optim.AdamW(groups, lr=given.lr, betas=betas, eps=given.adam_eps)
