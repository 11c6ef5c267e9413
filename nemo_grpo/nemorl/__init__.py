"""The cluster engine: every variant on NeMo-RL (Ray, Megatron, vLLM), without a change to NeMo-RL's source.

`run_grpo` is the driver; `loss` runs on the workers, `advantage` and `sampling` on the driver. `hooks` lists
what they replace of NeMo-RL, `uses` what they call; `doctor` compares both with a source tree, `compat` with
the installed one.
"""
