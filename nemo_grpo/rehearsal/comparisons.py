"""The export of a rehearsal against what does not come from the converters."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from nemo_grpo.rehearsal.adapters import adapters_of
from nemo_grpo.rehearsal.recomputed import aligned, all_logprobs, demonstrated, load, sequences_of
from nemo_grpo.rehearsal.recorded import Recorded, Row, convert
from nemo_grpo.rehearsal.stages import Failed, Rehearsal, newest_checkpoint, run_python

TOLERANCE = 0.015
"""Largest mean difference of logprobs, transformers in float32 against BF16, nats: rounding gave 0.002 to
0.004, hidden states divided by the temperature 0.016 to 0.036."""
ENTROPY_TOLERANCE = 0.005
"""Largest difference of a step's entropy, in which BF16's rounding averages out: it gave 0.0003, the weights
that training started from 0.03."""
ROUNDING = 2**-8
"""Largest relative difference of two BF16 numbers that were rounded from almost the same one: one digit."""


def bridges_export(rehearsal: Rehearsal, checkpoint: Path) -> Path:
    """Megatron-Bridge's export of the same checkpoint; it knows no adapters."""
    output = rehearsal.folder / "hf-of-bridge"
    (weights,) = (checkpoint / "policy" / "weights").glob("iter_*")
    with rehearsal.timed("Bridge's export"):
        folders = map(str, (rehearsal.model.folder, weights, output))
        run_python(rehearsal, ["-m", "nemo_grpo.rehearsal.export", *folders], "bridge.log")
    return output


def weights_of(folder: Path) -> dict[str, Tensor]:
    """A folder's tensors as they are stored."""
    from safetensors.torch import load_file

    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    if not found:
        raise Failed(f"{folder} holds no weights")
    return found


def compare_folders(ours: Path, theirs: Path) -> str:
    """Check that two Hugging Face folders hold the same model.

    Raises: Failed: a name is missing, or a weight differs in any bit.
    """
    models = [load(path, "auto") for path in (ours, theirs)]
    mine, other = (model.state_dict() for model in models)
    if set(mine) != set(other):
        raise Failed(f"other names than Bridge's: {sorted(set(mine) ^ set(other))[:5]}")
    if different := [name for name in mine if not torch.equal(mine[name], other[name])]:
        raise Failed(f"weights differ from Bridge's: {different[:5]}")
    tokens = torch.arange(3, 35)[None]
    with torch.no_grad():
        logits = [model(tokens).logits for model in models]
    if not torch.equal(*logits):
        raise Failed("logits differ from those of Bridge's export")
    return f"{len(mine)} weights and the logits equal those of Megatron-Bridge's export, bit for bit"


def compare_with_adapters(ours: Path, base: Path, checkpoint: Path, megatron_cfg: Any) -> str:
    """Check that an export is the base model plus the checkpoint's adapters.

    Raises: Failed: a weight is not W + (alpha / r) B A up to one digit of BF16, or none was adapted.
    """
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


def _not_merged(
    mine: dict[str, Tensor], before: dict[str, Tensor], updates: dict[str, Tensor]
) -> Iterator[str]:
    for name, weight in before.items():
        if name not in updates:
            if not torch.equal(mine[name], weight):
                yield name
            continue
        expected = (weight.float() + updates[name]).to(mine[name].dtype).float()
        if not torch.allclose(mine[name].float(), expected, rtol=ROUNDING, atol=1e-6):
            yield name


def compare_with_base(ours: Path, base: Path) -> None:
    """Check that training has moved the export.

    Raises: Failed: it equals the model that training started from.
    """
    mine, before = weights_of(ours), weights_of(base)
    if all(torch.equal(weight, before.get(name, weight)) for name, weight in mine.items()):
        raise Failed("every exported weight equals the model that training started from")


def compare_with_model(evidence: Recorded, folder: Path, rows: Sequence[Row], name: str, whose: str) -> str:
    """Check that transformers gives the recorded logprobs of a step's responses.

    Args:   folder: of the model.  name: ``prev_logprobs`` or ``generation_logprobs``.
            whose: for the message.
    Raises: Failed: they differ by more than BF16 rounding, or there are none.
    """
    sequences, temperature = sequences_of(evidence, rows), evidence.recipe.policy.generation.temperature
    if not sequences.mask.any():
        raise Failed("no token of the responses counts")
    mine, _ = all_logprobs(load(folder), sequences, temperature)
    differences = (mine - aligned(rows, name))[sequences.mask].abs().tolist()
    shown = (
        f"logprobs {fmean(differences):.4f} from the {whose}'s in the mean, at most {max(differences):.4f}"
    )
    if not fmean(differences) <= TOLERANCE:
        raise Failed(f"{shown}; {TOLERANCE} is allowed")
    return shown


def error_of_other_images(evidence: Recorded, rows: Sequence[Row], name: str) -> str:
    """How far a step's logprobs would be from the model's, had a group seen another group's images.

    Raises: Failed: so little that confused images would not be noticed.
    """
    sequences, temperature = sequences_of(evidence, rows), evidence.recipe.policy.generation.temperature
    seen, group = sequences.seen or [], evidence.recipe.grpo.num_generations_per_prompt
    model, recorded = load(evidence.rehearsal.model.folder), aligned(rows, name)[sequences.mask]
    largest = 0.0
    for shift in range(group, len(seen), group):
        others = replace(sequences, seen=[*seen[shift:], *seen[:shift]])
        found, _ = all_logprobs(model, others, temperature)
        largest = max(largest, float((found[sequences.mask] - recorded).abs().mean()))
    shown = f"{largest:.4f} with other problems' images"
    if not largest > TOLERANCE:
        raise Failed(f"{shown}, which is within {TOLERANCE}, so that confused images are not noticed")
    return shown


def compare_with_entropy(evidence: Recorded, folder: Path, rows: Sequence[Row], logged: float) -> str:
    """Check a step's logged entropy, where NeMo-RL records no logprobs of the worker.

    It is the token mean of -exp(logp - logp_gen) logp, of the policy that the step starts from.

    Raises: Failed: transformers gives another one, or there are no tokens.
    """
    sequences, temperature = sequences_of(evidence, rows), evidence.recipe.policy.generation.temperature
    if not sequences.mask.any():
        raise Failed("no token of the responses counts")
    mine, _ = all_logprobs(load(folder), sequences, temperature)
    terms = -(mine - aligned(rows, "generation_logprobs")).exp() * mine
    found = float(terms[sequences.mask].mean())
    shown = f"entropy {found:.4f} where the resumed worker logged {logged:.4f}"
    if not abs(found - logged) <= ENTROPY_TOLERANCE:
        raise Failed(f"{shown}; {ENTROPY_TOLERANCE} is allowed")
    return shown


def validation_loss(evidence: Recorded) -> float:
    """The last checkpoint's mean NLL of the tokens of the validation's demonstrations, nats."""
    sequences = demonstrated(evidence, None)
    model = load(convert(evidence.rehearsal, newest_checkpoint(evidence.rehearsal), "hf-last"))
    return -float(all_logprobs(model, sequences, 1.0)[0][sequences.mask].mean())
