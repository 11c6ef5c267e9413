"""The planner: memory, time and cost of a recipe, without a GPU, a network or an engine.

`recipe check` imports `nemo_grpo.plan.rules` alone, so nothing is imported here.
"""
