"""Evaluation of a policy: greedy, avg@k, pass@k, maj@k on a task's held-out problems."""

from nemo_grpo.evaluate.passk import majority_at_k, mean_and_stderr, pass_at_k
from nemo_grpo.evaluate.runner import EvalResult, Verdicts, evaluate

__all__ = ["EvalResult", "Verdicts", "evaluate", "majority_at_k", "mean_and_stderr", "pass_at_k"]
