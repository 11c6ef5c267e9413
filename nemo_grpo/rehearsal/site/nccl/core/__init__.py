"""A communicator whose broadcasts go through a TCPStore: for weights of a few megabytes."""

SUM = "sum"
"""An operation that NeMo-RL imports for other peers than its own."""
