"""Comparison of the logits of a Hugging Face model and a Megatron checkpoint, on a fixed prompt."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoints_conv.verify import read_megatron
from nemo_grpo.engine.megatron import cpu, parallel
from nemo_grpo.engine.megatron.model import build_model, transformer_config
from nemo_grpo.models import COMPUTED, read_spec
from nemo_grpo.recipe.layout import Layout
from nemo_grpo.support.errors import UserError
from nemo_grpo.support.model_folder import hf_config

_PROMPT = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233)
"""Token ids of the prompt, to be taken modulo the vocabulary's size."""
LOGITS_TOLERANCE = 1e-4
"""Largest difference between float32 logits that two implementations of the same model may have."""


def compare_logits(hf_model: Path, megatron_checkpoint: Path) -> float:
    """Measure the largest difference in float32 logits between transformers and megatron-core.

    Both models are built whole, in memory. megatron-core loads the tensors by its own names, so this also
    tests that each name has the right tensor.

    Returns:
        The largest absolute difference; at most `LOGITS_TOLERANCE` for the same model.
    """
    # Imported late: the import takes a second, and no other function here needs it.
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(hf_model, dtype=torch.float32)
    tokens = torch.tensor([[token % model.config.vocab_size for token in _PROMPT]])
    with torch.no_grad():
        expected = model(tokens).logits
        computed = _megatron_logits(hf_config(hf_model), megatron_checkpoint, tokens)
    return float((expected - computed).abs().max())


def check_computed(hf_model: Path) -> None:
    """Refuse a model that the embedded engine cannot compute, so that its logits cannot be compared."""
    try:
        transformer_config(read_spec(hf_config(hf_model), among=COMPUTED), Layout(), torch.float32)
    except UserError as error:
        raise UserError(f"--logits: {error}; leave --logits out to compare the tensors alone") from None


def _megatron_logits(config: dict[str, Any], checkpoint: Path, tokens: Tensor) -> Tensor:
    cpu.install()
    spec = read_spec(config, among=COMPUTED)
    layout = Layout()
    parallel.initialize(layout, torch.device("cpu"), seed=0)
    try:
        model = build_model(spec, transformer_config(spec, layout, torch.float32))
        tensors = read_megatron(config, checkpoint)
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors.pop(name))
        if tensors:
            raise UserError(f"megatron-core has no place for {', '.join(sorted(tensors))}")
        # `PackableGPTModel` returns hidden states, without its output layer.
        logits = model(tokens, None, None) @ model.output_weight.T
        return logits[..., : spec.vocab_size]
    finally:
        parallel.shut_down()
