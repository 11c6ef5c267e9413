"""Start-up hook of a rehearsal's processes: Python imports it from their PYTHONPATH."""

import os

if os.environ.get("TORCHVISION_FOLDER"):
    from nemo_grpo.rehearsal import torchvision_names

    torchvision_names.install()
if os.environ.get("NEMO_GRPO_REHEARSAL"):
    import rehearsal_hooks

    rehearsal_hooks.install()
