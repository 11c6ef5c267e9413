"""Evaluation of a policy: greedy, avg@k, pass@k, maj@k on a task's held-out problems."""

from nemo_grpo.evaluate.passk import majority_at_k, mean_and_stderr, pass_at_k
from nemo_grpo.evaluate.runner import EvalResult, Verdicts, evaluate_problems
from nemo_grpo.evaluate.sampling import ResponseSource
from nemo_grpo.evaluate.suite import Evaluation, evaluate
from nemo_grpo.support.sections import EvalOptions

__all__ = [
    "EvalOptions",
    "EvalResult",
    "Evaluation",
    "ResponseSource",
    "Verdicts",
    "evaluate",
    "evaluate_problems",
    "majority_at_k",
    "mean_and_stderr",
    "pass_at_k",
]
