"""The planner: memory, time and cost of a recipe, without a GPU, a network or an engine."""

from nemo_grpo.plan.hardware import HARDWARE
from nemo_grpo.plan.planner import Plan, plan_recipe

__all__ = ["HARDWARE", "Plan", "plan_recipe"]
