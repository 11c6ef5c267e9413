"""The embedded engine: trains a recipe on this machine, without NeMo-RL.

`run` is the entry, `setup` builds the parts, and `loop` takes the steps (`steps`): rollout, reward,
advantage, update, checkpoint. The policy itself, on megatron-core, is in `megatron`.
"""
