"""Will it fit, how long will it take, what will it cost? Without a GPU, a network or an engine."""

from nemo_grpo.plan.memory import GPUS
from nemo_grpo.plan.planner import Plan, plan_recipe

__all__ = ["GPUS", "Plan", "plan_recipe"]
