"""Checks that every loss must pass, on small made-up steps.

``nemo-grpo variants check``, the start of a run with an own loss, and the tests of the variants stand on it.
`sanity` checks that a loss is well formed, `invariance` that it is the same however a step is split;
`check_variant` runs both.
"""

from nemo_grpo.variants.checking.runner import CHECKS, Failure, check_variant, try_out

__all__ = ["CHECKS", "Failure", "check_variant", "try_out"]
