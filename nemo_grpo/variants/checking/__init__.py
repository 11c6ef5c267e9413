"""What must hold for every loss, on small made-up steps.

``nemo-grpo variants check``, the start of a run with an own loss, and the tests of the variants stand on it.
`steps` makes the steps, `invariance` checks an objective on one of them, `declarations` what a class says of
itself; `check_variant` runs all of it.
"""

from nemo_grpo.variants.checking.runner import CHECKS, Failure, check_variant, try_out

__all__ = ["CHECKS", "Failure", "check_variant", "try_out"]
