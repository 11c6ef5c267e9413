"""Hidden states that NeMo-RL divides by the temperature; imported on the workers only.

NeMo-RL divides every pipeline stage's output in place, and an earlier stage's output is hidden states: at PP
2 and temperature 0.7 the trained model is not the one that vLLM samples from.

Upstream: none known.
Versions: NeMo-RL 0.7.0 and 7ea279abf.
Needed while: tests/nemo_rl/test_workarounds.py::test_nemo_rl_scales_the_output_of_every_stage
"""

from typing import Any

from megatron.core import parallel_state
from nemo_rl.models.megatron.train import apply_temperature_scaling
from torch import Tensor


def scale_logits_only(output: Tensor, *arguments: Any, **named: Any) -> Tensor:
    """Scale by the temperature as NeMo-RL does, on the last pipeline stage only."""
    if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        return output
    return apply_temperature_scaling(output, *arguments, **named)
