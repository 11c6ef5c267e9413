"""Import hooks of a rehearsal: each patch is imported right after the module that it changes, not earlier.

Every process of a rehearsal has them: the driver, Ray's workers, vLLM's engine, in up to two environments.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import typing
from typing import Any

AFTER_IMPORT: dict[str, str] = {
    "megatron.core": "cuda:after_megatron",
    "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding": "megatron:compute_yarn_here",
    "megatron.core.distributed.fsdp.mcore_fsdp_adapter": "megatron:add_newer_names",
    "transformers.models.qwen2_5_vl.configuration_qwen2_5_vl": "megatron:say_that_any_key_is_taken",
    "nemo_rl.models.policy.workers.megatron_policy_worker": "megatron:prepare",
    "nemo_rl.utils.nvml": "nemo_rl:name_logical_gpus",
    "nemo_rl.models.policy.utils": "nemo_rl:send_bytes_for_handles",
    "nemo_rl.distributed.ray_actor_environment_registry": "nemo_rl:choose_interpreters",
    "nemo_rl.data.datasets.response_datasets.clevr": "nemo_rl:read_pictures_here",
    # NeMo-RL imports this module right before its check of the version of transformers.
    "nemo_rl.models.huggingface.common": "nemo_rl:pass_version_check",
    "nemo_rl.models.policy": "nemo_rl:restore_version",
    "nemo_rl.models.generation.vllm.vllm_worker": "vllm:prepare_worker",
    # AsyncLLM's own process imports this one alone.
    "nemo_rl.models.generation.vllm.vllm_backend": "vllm:prepare_backend",
    "vllm.entrypoints.llm": "vllm:keep_memory",
    "vllm.v1.engine.async_llm": "vllm:keep_memory_asynchronously",
    "vllm.platforms.cpu": "vllm:allow_ray",
    "vllm.model_executor.layers.utils": "vllm:keep_weights_in_place",
    "vllm.model_executor.layers.fused_moe.experts.cpu_moe": "vllm:keep_experts_in_place",
}
"""Module -> ``file:function`` of `nemo_grpo.rehearsal`, called with the module once it has been imported."""
REPLACED: dict[str, dict[str, Any]] = {
    # megatron-core's wheel has no Makefile for the data sets' helpers, which reinforcement does not use.
    # Needed while: tests/nemo_rl/test_workarounds.py::test_the_wheel_of_megatron_core_has_no_makefile
    "megatron.core.datasets.utils": {"compile_helpers": lambda *_, **__: None},
    # The TransferQueue's actors run in the driver's Python; NeMo-RL would have Ray install it by pip.
    "nemo_rl.data_plane.adapters.transfer_queue": {"_TQ_RUNTIME_ENV_PATCHED": True},
    # NeMo-RL edits vLLM's files in place for Ray executors, which a single process does not use.
    "nemo_rl.models.generation.vllm.patches": {"_apply_vllm_patches": lambda *_, **__: None},
    # vLLM inspects a model's class in a separate process, whose import of vLLM takes eight seconds.
    "vllm.model_executor.models.registry": {"_run_in_subprocess": lambda function: function()},
}
"""Module -> its names that are replaced once it has been imported."""

ABSENT = ("transformer_engine", "modelopt", "nvidia_resiliency_ext", "megatron.energon")
"""Packages of a GPU host that Megatron-Bridge 0.6 imports unconditionally. They are empty modules for Bridge
alone, because megatron-core itself checks what is installed.

Needed while: tests/nemo_rl/test_workarounds.py::test_bridge_imports_packages_of_a_gpu_host"""
OPTIONAL = ("nvidia_resiliency_ext.checkpointing",)
"""Submodules whose importers handle their absence."""


def install() -> None:
    """Put the hooks into this process."""
    use_newer_typing()
    sys.meta_path.insert(0, AfterImport())
    # Last, so that installed packages take precedence.
    sys.meta_path.append(EmptyModules())


def use_newer_typing() -> None:
    """Replace typing's typed dictionaries, which pydantic refuses below Python 3.12; NeMo-RL is for 3.13.

    Upstream: none; pydantic documents it (error code typed-dict-version).
    Versions: Python below 3.12.
    Needed while: tests/unit/rehearsal/test_hooks.py::test_pydantic_refuses_typings_dictionaries_below_3_12
    """
    if sys.version_info < (3, 12):
        typing_extensions = importlib.import_module("typing_extensions")
        for name in ("TypedDict", "NotRequired", "Required", "override"):
            setattr(typing, name, getattr(typing_extensions, name))


class AfterImport(importlib.abc.MetaPathFinder):
    """Wraps the other finders, and applies the replacement once the module has run."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in AFTER_IMPORT | REPLACED:
            return None
        for finder in sys.meta_path:
            # Finders of Python's old protocol have no find_spec.
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                execute = _then_replace(spec.loader.exec_module, name)
                spec.loader.exec_module = execute  # type: ignore[method-assign]
                return spec
        return None


def _then_replace(execute: Any, name: str) -> Any:
    """Make an ``exec_module`` that runs the module, then applies its replacements."""

    def exec_module(module: types.ModuleType) -> None:
        execute(module)
        vars(module).update(REPLACED.get(name, {}))
        if name in AFTER_IMPORT:
            file, _, function = AFTER_IMPORT[name].partition(":")
            patches = importlib.import_module(f"nemo_grpo.rehearsal.{file}")
            getattr(patches, function)(module)

    return exec_module


class EmptyModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Empty modules in which every name is a class.

    Attributes:
        absent: the absent packages.
        importer: package that may import them; "": every package may.
    """

    def __init__(self, absent: tuple[str, ...] = ABSENT, importer: str = "megatron.bridge") -> None:
        self.absent = absent
        self.importer = importer

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        package = self._absent_package(name)
        if package is None or name.startswith(OPTIONAL):
            return None
        # Once Bridge has imported the package, every importer finds it in sys.modules, and may import its
        # submodules as well.
        if package not in sys.modules and not _importer().startswith(self.importer):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def _absent_package(self, name: str) -> str | None:
        """Return the absent package that contains a module, or None."""
        for package in self.absent:
            if name == package or name.startswith(f"{package}."):
                return package
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        # With __path__ the module is a package, so that Python asks this finder for its submodules.
        module.__path__ = []
        module.__getattr__ = _any_class  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Run nothing."""


def _importer() -> str:
    """Name the module whose import statement is running."""
    # Frame 0 is this function, and frame 1 the finder's find_spec.
    frame: Any = sys._getframe(2)
    while frame and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")) if frame else ""


class _AnyClass(type):
    """Metaclass of classes whose every attribute is such a class, too."""

    def __getattr__(cls, name: str) -> Any:
        return _any_class(name)


def _any_class(name: str) -> Any:
    # Python and inspect look for optional attributes, such as __path__ or __wrapped__, which must be absent.
    if name.startswith("__"):
        raise AttributeError(name)
    return _AnyClass(name, (), {})
