"""Weights of vLLM that stay random for models with images.

NeMo-RL starts vLLM with random weights, and a refit sends only what Megatron-Bridge exports: other tensors,
such as vLLM 0.32's image normalisation, would stay random.

Upstream: NeMo-RL pull request 3904.
Versions: NeMo-RL 0.7.0 and 7ea279abf.
Needed while: tests/nemo_rl/test_workarounds.py::test_nemo_rl_starts_vllm_with_random_weights
"""

from typing import Any

LOADED = "auto"
"""vLLM's load format that reads the model's files."""


def load_image_weights(generation: Any) -> None:
    """Let vLLM load the model's files.

    Args:
        generation: the section of NeMo-RL's configuration, after NeMo-RL has completed it; changed.
    """
    generation["vllm_cfg"]["load_format"] = LOADED
