"""GRPO and its variants on Megatron-core and NeMo-RL: one recipe, one set of losses."""

from nemo_grpo.core.batch import PreparedBatch, TokenBatch, global_counts
from nemo_grpo.core.objective import Objective
from nemo_grpo.support.errors import UserError
from nemo_grpo.variants import VARIANTS, build_objective, parse_loss_fn

__version__ = "0.1.0"

__all__ = [
    "Objective",
    "PreparedBatch",
    "TokenBatch",
    "UserError",
    "VARIANTS",
    "__version__",
    "build_objective",
    "global_counts",
    "parse_loss_fn",
]
