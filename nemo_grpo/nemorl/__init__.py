"""The cluster engine: every variant on NeMo-RL (Ray, Megatron, vLLM), without a change to NeMo-RL's source.

`run_grpo` is the driver; `loss` runs on the workers, `advantage` and `sampling` on the driver; `compat` lists
every private name that they use.
"""
