"""Tensors pickled by the driver that only processes with Megatron can read.

Importing megatron.core replaces the function that pickled tensors refer to by Megatron's own. The driver
imports it as a side effect of unpickling a Megatron worker's result. vLLM's workers may not have Megatron.

Upstream: none known.
Versions: megatron-core 0.19; 0.16.1 does not replace it.
Needed while: tests/nemo_rl/test_workarounds.py::test_importing_megatron_core_changes_how_tensors_are_pickled
"""

from nemo_grpo.nemorl import compat


def keep_tensor_pickles_plain() -> None:
    """Import Megatron now, once, and put torch's function back."""
    import torch

    plain = torch.storage._load_from_bytes
    if compat.has_name("megatron.core:__version__"):
        torch.storage._load_from_bytes = plain
