"""``python -m checkpoints_conv``."""

from checkpoints_conv.cli import main

main()
