"""nccl4py's names that NeMo-RL imports to send weights to rollout GPUs of their own; see `core`."""
