"""Errors for weights that do not fit their config.json."""

from collections.abc import Sequence
from typing import NoReturn

from nemo_grpo.core.lazy import Tensor, torch
from nemo_grpo.support.errors import UserError, listed

_PACKED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
"""Ends of the names under which transformers 5 holds all experts of a layer in one tensor."""


def check_tied(embedding: Tensor, output: Tensor, tied_by: str) -> None:
    """Refuse an output layer that differs from the embedding to which it is tied."""
    # The same memory needs no comparison, which would read gigabytes at every refit.
    if embedding.data_ptr() != output.data_ptr() and not torch.equal(embedding, output):
        refuse_untied(tied_by)


def refuse_untied(tied_by: str) -> NoReturn:
    """Say that embeddings which should be tied are not. Args: tied_by: `Family.tied_by`."""
    raise UserError(
        f"{tied_by}, but the output layer differs from the embedding, and transformers would drop it; are "
        "the weights and config.json of the same model?"
    )


def refuse_shape(name: str, shape: Sequence[int], expected: Sequence[int]) -> NoReturn:
    """Say that a tensor has another shape than config.json says."""
    raise UserError(
        f"{name} is {list(shape)}, config.json says {list(expected)}; are the weights and config.json of the "
        "same model?"
    )


def refuse_unmatched(side: str, absent: set[str], extra: set[str], remedy: str = "") -> None:
    """Refuse weights whose names are not exactly those of the table.

    Args:
        side: Hugging Face or Megatron.
        absent: names that only the table has.
        extra: names that only the weights have.
        remedy: end of the message.
    """
    problems = []
    if absent:
        problems.append(f"missing: {listed(absent)}")
    if extra:
        problems.append(f"not known: {listed(extra)}")
    if problems:
        raise UserError(f"the {side} tensors do not fit config.json; {'; '.join(problems)}{remedy}")


def remedy_of_packed(extra: set[str]) -> str:
    """Return the remedy for experts packed into one tensor, as transformers holds them; else ""."""
    if not any(name.endswith(_PACKED) for name in extra):
        return ""
    return (
        "; the experts are packed: load the model with transformers and save it with "
        "save_pretrained(FOLDER, save_original_format=True)"
    )
