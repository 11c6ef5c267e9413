"""``python -m nemo_grpo.cli``: the command line without an installed script."""

from nemo_grpo.cli import main

main()
