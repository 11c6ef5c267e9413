"""``python -m checkpoints_conv``: the command ``nemo-grpo convert``."""

from nemo_grpo.cli import convert, main

main(convert.app)
