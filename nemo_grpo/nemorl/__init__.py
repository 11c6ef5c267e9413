"""The cluster engine: every variant on NeMo-RL (Ray, Megatron, vLLM), without a change to NeMo-RL's source.

`run_grpo` is the driver; `loss` runs on the workers, `advantage` and `sampling` on the driver. `host_api`
lists what they call and replace of NeMo-RL; `doctor` compares that with a source tree, `compat` with the
installed one.
"""
