"""Python imports this at every start: on PYTHONPATH of the processes of a rehearsal, and nowhere else."""

import os

if os.environ.get("TORCHVISION_FOLDER"):
    from nemo_grpo.rehearsal import torchvision_names

    torchvision_names.install()
if os.environ.get("NEMO_GRPO_REHEARSAL"):
    import rehearsal_hooks

    rehearsal_hooks.install()
