"""A refit that sends weights from before the step.

With overlap_param_gather, NeMo-RL's default, each rank updates its part of the weights and gathers the other
parts in its next forward pass. The refit comes before that pass, so vLLM would get a mixture of old and new
weights.

Upstream: NeMo-RL pull request 4086, which adds `Policy.sync_params_before_refit`.
Versions: NeMo-RL 0.7.0 and 7ea279abf.
Needed while: tests/nemo_rl/test_workarounds.py::test_nemo_rl_does_not_gather_parameters_before_a_refit
"""

import logging

from nemo_grpo.nemorl import compat
from nemo_grpo.nemorl.host_api import POLICY
from nemo_grpo.recipe import Recipe
from nemo_grpo.recipe.cluster_rules import refit_sends_updated_weights
from nemo_grpo.recipe.interpolation import Tree
from nemo_grpo.recipe.sections import OVERLAP
from nemo_grpo.support.dotted import set_value

log = logging.getLogger(__name__)


def gather_before_refits(recipe: Recipe, tree: Tree) -> None:
    """Set overlap_param_gather to false where the refit would send the weights from before the step.

    Args:
        recipe: decides whether the refit is affected.
        tree: NeMo-RL's configuration; changed.
    """
    if gathers_by_itself():
        return
    for reason in refit_sends_updated_weights(recipe):
        log.warning("%s", reason)
        set_value(tree, OVERLAP, False)


def gathers_by_itself() -> bool:
    """Return True if NeMo-RL gathers all parameters before it sends them."""
    return hasattr(compat.import_name(POLICY), "sync_params_before_refit")
