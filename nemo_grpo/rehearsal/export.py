"""``python -m nemo_grpo.rehearsal.export MODEL CHECKPOINT OUTPUT``: Megatron-Bridge's own export.

The reference for the converters' result. A separate process, because Bridge needs a rehearsal's hooks.
"""

import importlib
import sys


def main(model: str, checkpoint: str, output: str) -> None:
    """Export a checkpoint of NeMo-RL as a Hugging Face folder.

    Args: model: the folder that the run started from.  checkpoint: ``step_N/policy/weights/iter_*``.
    """
    importlib.import_module("nemo_rl.models.policy.workers.megatron_policy_worker")  # and its replacements
    community_import = importlib.import_module("nemo_rl.models.megatron.community_import")
    community_import.export_model_from_megatron(model, checkpoint, output, model, overwrite=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
