"""A communicator whose broadcasts go through a TCPStore: for weights of a few megabytes."""
