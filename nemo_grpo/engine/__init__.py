"""The embedded engine: rollout, reward, advantage, update, checkpoint, on this machine."""
