"""Python imports this at every start: on PYTHONPATH of the processes of a rehearsal, and nowhere else."""

import os

if os.environ.get("NEMO_GRPO_REHEARSAL"):
    import rehearsal_hooks

    rehearsal_hooks.install()
