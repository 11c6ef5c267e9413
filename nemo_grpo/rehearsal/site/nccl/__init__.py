"""nccl4py's names that NeMo-RL imports to send weights to separate rollout GPUs; see `core`."""
