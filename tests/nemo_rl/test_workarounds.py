"""Faults of NeMo-RL, Ray and Megatron that we work around are still there; a test that fails ends its file.

`test_killed_conversion` has one more. The second half is about patches of rehearsals.
"""

import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import nemo_rl
import pytest
from nemo_rl.models.generation import configure_generation_config
from nemo_rl.utils.checkpoint import CheckpointManager
from toy_training import GENERATIONS, rollouts

from nemo_grpo.nemorl import compat
from nemo_grpo.nemorl.workarounds.async_save import PACKAGE
from nemo_grpo.nemorl.workarounds.ray_address import PATIENCE
from nemo_grpo.nemorl.workarounds.stale_refit import gathers_by_itself
from nemo_grpo.rehearsal.megatron import NEWER_NAMES
from nemo_grpo.rehearsal.nemo_rl import IN_THE_DRIVERS_PYTHON
from nemo_grpo.rehearsal.vllm import SHARED_METHOD

SOURCE = Path(next(iter(nemo_rl.__path__)))
IS_0_7_0 = compat.version() == compat.V0_7_0


def run_python(code, timeout=300, **environment):
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=os.environ | {"PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.mark.skipif(IS_0_7_0, reason="0.7.0 never saves asynchronously")
def test_nemo_rl_saves_asynchronously_and_looks_for_no_package():
    configs = SOURCE.parent / "examples" / "configs"
    assert "async_save: true" in (configs / "grpo_math_1B.yaml").read_text()
    assert not [path for path in SOURCE.rglob("*.py") if PACKAGE in path.read_text()]


def test_ray_tries_an_address_for_longer_than_we_wait():
    with pytest.raises(subprocess.TimeoutExpired):
        run_python("import ray; ray.init(address='auto')", 2 * PATIENCE, RAY_ADDRESS="127.0.0.1:1")


AFTER_THE_END = """
import ray

ray.init(address="local", num_cpus=1, include_dashboard=False)
ray.shutdown()
ray.put(1)
print("connected", ray.is_initialized())
"""


def test_ray_starts_by_itself_when_it_is_called_after_its_end():
    done = run_python(AFTER_THE_END)
    assert "connected True" in done.stdout, done.stderr
    done = run_python(AFTER_THE_END, RAY_ENABLE_AUTO_CONNECT="0")
    assert "connected" not in done.stdout


def test_importing_megatron_core_changes_how_tensors_are_pickled():
    code = "import torch; f = torch.storage._load_from_bytes; import megatron.core; "
    done = run_python(f"{code} print(torch.storage._load_from_bytes is f)")
    assert done.stdout.splitlines()[-1:] == ["False"], done.stderr


def test_nemo_rl_does_not_gather_parameters_before_a_refit():
    assert not gathers_by_itself()


def test_nemo_rl_starts_vllm_with_random_weights():
    generation = {"backend": "vllm", "vllm_cfg": {}, "stop_token_ids": None, "stop_strings": None}
    tokenizer = MagicMock(pad_token_id=0, eos_token_id=1)
    assert configure_generation_config(generation, tokenizer)["vllm_cfg"]["load_format"] == "dummy"


@pytest.mark.skipif(not IS_0_7_0, reason="it asks megatron-core")
def test_nemo_rl_finds_no_optimizer_in_a_newer_checkpoint(tmp_path):
    (tmp_path / "policy" / "weights" / "iter_0000000").mkdir(parents=True)  # without common.pt
    _, optimizer = CheckpointManager.get_resume_paths(tmp_path)
    assert optimizer is None
    source = inspect.getsource(CheckpointManager.get_resume_paths)
    assert "common.pt" in source
    assert "megatron" not in source.replace("Megatron", "").lower()


def test_nemo_rl_scales_the_output_of_every_stage():
    """Hidden states of an earlier stage are divided in place: no code on the way asks for the stage."""
    code = """
import newer_python, megatron_without_gpu
megatron_without_gpu.install()
import inspect
from nemo_rl.models.megatron import train
print(inspect.getsource(train.apply_temperature_scaling))
print(inspect.getsource(train.forward_with_post_processing_fn))
"""
    done = run_python(code)
    assert "apply_temperature_scaling" in done.stdout, done.stderr
    assert "is_pipeline_last_stage" not in done.stdout


@pytest.mark.skipif(IS_0_7_0, reason="it has no single controller")
def test_the_controller_trains_on_cut_prompts():
    """Its batch has every response, whatever its prompt's loss_multiplier and its reward are."""
    from nemo_rl.experience.interfaces import Completion, PromptGroupRecord
    from nemo_rl.experience.payload import record_to_train_batch

    logs = rollouts()["message_log"][:GENERATIONS]
    completions = [Completion(log, None, False, float("nan")) for log in logs]
    record = PromptGroupRecord(0, logs[0][:1], None, {"loss_multiplier": 0.0}, completions, {})
    batch = record_to_train_batch(record, pad_value_dict={"token_ids": 0})
    assert batch["sample_mask"].tolist() == [1.0] * GENERATIONS


@pytest.mark.skipif(IS_0_7_0, reason="0.7.0 divides no metric by chunks")
def test_nemo_rls_worker_reads_the_metrics_denominators_after_the_last_microbatch():
    """`ObjectiveLoss` fills the dictionary in its calls: the worker must keep the same one."""
    code = """
import newer_python, megatron_without_gpu
megatron_without_gpu.install()
import torch
from types import SimpleNamespace
from unittest.mock import patch
from nemo_rl.models.policy.workers import megatron_policy_worker as module
loss = SimpleNamespace(metric_normalizations={})
worker = SimpleNamespace(cfg={})
zeros = torch.zeros
with patch.object(torch, "zeros", lambda *a, device=None, **n: zeros(*a, **n)):
    state = module.MegatronPolicyWorkerImpl._split_step_state_init(worker, loss, 1, 1)
print(state["metric_normalizations"] is loss.metric_normalizations)
"""
    done = run_python(code)
    assert done.stdout.splitlines()[-1:] == ["True"], done.stderr


def folder_of(package):
    """Folder of a package of megatron, which is not imported for it."""
    return Path(importlib.util.find_spec(package).origin).parent


def test_nemo_rls_refit_imports_its_fp8_module_always():
    backend = (SOURCE / "models/generation/vllm/vllm_backend.py").read_text()
    assert "\n        from nemo_rl.models.generation.vllm.quantization import fp8\n" in backend
    fp8 = (SOURCE / "models/generation/vllm/quantization/fp8.py").read_text()
    assert "\nfrom vllm.model_executor.layers." in fp8, "kernels, at the top"


@pytest.mark.skipif(IS_0_7_0, reason="its extension has no such method")
def test_nemo_rls_extension_has_a_method_of_vllms_worker():
    """tests/vllm/test_rehearsal_workarounds.py shows that vLLM's worker has it, too."""
    backend = (SOURCE / "models/generation/vllm/vllm_backend.py").read_text()
    assert f"def {SHARED_METHOD}(" in backend


@pytest.mark.skipif(IS_0_7_0, reason="it imports released names")
def test_nemo_rl_imports_names_of_an_unreleased_megatron_core():
    worker = (SOURCE / "models/policy/workers/megatron_policy_worker.py").read_text()
    adapter = (folder_of("megatron.core") / "distributed/fsdp/mcore_fsdp_adapter.py").read_text()
    for name in NEWER_NAMES:
        assert name in worker
        assert name not in adapter


def test_the_vision_configuration_hides_that_it_takes_any_key():
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig as Config

    kinds = [parameter.kind for parameter in inspect.signature(Config).parameters.values()]
    assert inspect.Parameter.VAR_KEYWORD not in kinds
    assert Config(a_key_of_ours=1).a_key_of_ours == 1


def test_nemo_rl_refuses_the_transformers_that_vllm_needs():
    check = (SOURCE / "models/policy/__init__.py").read_text()
    assert 'assert PkgVersion(transformers.__version__) < PkgVersion("5.12.0")' in check


def test_nemo_rl_starts_some_actors_by_uv_whatever_it_is_told():
    code = f"""
from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY as registry
print([registry[name].partition(" ")[0] for name in {IN_THE_DRIVERS_PYTHON}])
"""
    done = run_python(code, NEMO_RL_PY_EXECUTABLES_SYSTEM="1")
    assert done.stdout.splitlines()[-1:] == [str(["uv"] * 3)], done.stderr


def test_bridge_imports_packages_of_a_gpu_host():
    done = run_python("import newer_python, megatron.bridge")
    assert "ModuleNotFoundError: No module named 'transformer_engine'" in done.stderr


def test_the_wheel_of_megatron_core_has_no_makefile():
    assert not (folder_of("megatron.core") / "datasets" / "Makefile").exists()


def test_bridge_ignores_the_rotary_sections_of_a_vision_model():
    bridge = folder_of("megatron.bridge") / "models/qwen_vl/qwen25_vl_bridge.py"
    assert "mrope_section" not in bridge.read_text()
