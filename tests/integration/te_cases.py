"""What `test_te_on_cpu` runs in processes that have Transformer Engine on the CPU (`te_on_cpu`).

``main(answers, cases)`` writes to the file ``answers``, with torch.save, what each case returned on rank 0.
It is called by a process without a main module, which every rank would import again.
"""

import functools
import itertools
import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import te_on_cpu

te_on_cpu.install()

import test_policy_gpu as tests  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import dist_checkpointing  # noqa: E402
from ranks import run_ranks  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from test_policy_gpu import SETTINGS, SIZES, Run  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config  # noqa: E402

from checkpoints_conv.hf_to_megatron import hf_to_megatron  # noqa: E402
from checkpoints_conv.megatron_to_hf import megatron_to_hf  # noqa: E402
from nemo_grpo.engine.megatron import model  # noqa: E402
from nemo_grpo.engine.megatron.checkpoint import begin_save, load_policy  # noqa: E402
from nemo_grpo.engine.megatron.layers import transformer_engine_is_installed  # noqa: E402
from nemo_grpo.engine.megatron.lora import LoRASettings  # noqa: E402
from nemo_grpo.engine.megatron.options import FP8_CAPABILITY  # noqa: E402
from nemo_grpo.engine.megatron.policy import MegatronPolicy  # noqa: E402
from nemo_grpo.recipe.layout import Layout  # noqa: E402

FAMILIES: dict[str, Callable[..., Any]] = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}
ADAPTERS = LoRASettings(8, 16)


def begun(
    impl: str = "transformer_engine",
    layout: dict[str, Any] | None = None,
    family: str = "qwen2",
    lora: bool = False,
    mb_tokens: int | None = None,
    **fields: Any,
) -> Run:
    assert transformer_engine_is_installed()
    torch.manual_seed(0)
    config = FAMILIES[family](**SIZES, tie_word_embeddings=family != "llama")
    weights = AutoModelForCausalLM.from_config(config).float().state_dict()
    policy = MegatronPolicy(
        config,
        SETTINGS,
        dtype=torch.bfloat16,
        layout=Layout(**layout or {}),
        lora=ADAPTERS if lora else None,
        config_fields={"transformer_impl": impl, **fields},
    )
    policy.load_weights(dict(weights), keep_reference=False)
    return Run(policy, mb_tokens)


def updates(num_steps: int = 2, **arguments: Any) -> dict[str, Any]:
    """Score, then updates on one rollout."""
    return begun(**arguments).trained(num_steps)


def resumed(folder: str, loaded_by: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    """Two updates, a checkpoint, one more; and one more of a policy that loads the checkpoint."""
    run = begun(**arguments)
    scores = run.score()
    run.step(scores)
    run.step(scores)
    begin_save(run.policy, Path(folder), 2).finish()
    run.step(scores)
    again = begun(**(arguments | loaded_by))
    load_policy(again.policy, Path(folder))
    again.step(scores)
    return {"unbroken": run.answer(run.score()), "resumed": again.answer(again.score())}


def converted(folder: str, **arguments: Any) -> dict[str, Any]:
    """What these layers read of a converted model; and a policy after an update, converted back."""
    hf, megatron = Path(folder) / "hf", Path(folder) / "megatron"
    run = begun(**arguments)
    if dist.get_rank() == 0:
        torch.manual_seed(1)
        other = AutoModelForCausalLM.from_config(run.policy.hf).bfloat16()
        other.save_pretrained(hf)
        hf_to_megatron(hf, megatron)
    dist.barrier()
    state = {"model": run.policy.sharded_state_dict(loading=True)["model"]}
    loaded = dist_checkpointing.load(state, str(megatron / "iter_0000000"))  # at the strictness it has
    run.policy.model.load_state_dict(loaded["model"])
    read = {name: x.clone() for name, x in run.policy.named_tensors()}

    trained = begun(**arguments)
    trained.step(trained.score())
    begin_save(trained.policy, Path(folder) / "step", 1).finish()
    dist.barrier()
    if dist.get_rank() == 0:
        megatron_to_hf(Path(folder) / "step", hf, Path(folder) / "back")
    return {
        "model": load_file(hf / "model.safetensors") if dist.get_rank() == 0 else {},
        "read": read,
        "weights": {name: x.clone() for name, x in trained.policy.named_tensors()},
        "back": load_file(Path(folder) / "back" / "model.safetensors") if dist.get_rank() == 0 else {},
    }


def gpu_tests(folder: str) -> dict[str, Any]:
    """The tests of tests/gpu that need Transformer Engine, and which of them fail, with the reason."""

    def impl(dtype: torch.dtype) -> str:
        return "transformer_engine" if dtype == torch.bfloat16 else "local"

    def on_cpu(name: str, *arguments: Any) -> Any:
        return getattr(tests, name)(*arguments)

    bodies = {
        "bf16": lambda: tests.test_bf16_with_transformer_engine_equals_the_cpu(on_cpu),
        "recompute": lambda: tests.test_recompute_gives_the_same_update({}),
        "packed": lambda: tests.test_packed_sequences_give_the_same_update({}),
        "checkpoint": lambda: tests.test_a_checkpoint_of_transformer_engine_resumes(Path(folder)),
    }
    for recipe, form in itertools.product(FP8_CAPABILITY, ("e4m3", "hybrid")):
        test = functools.partial(tests.test_fp8_is_finite_and_close_to_bf16, recipe, form)
        bodies[f"fp8 {recipe} {form}"] = test
    failed = {}
    with mock.patch.object(model, "transformer_impl", impl):
        for name, body in bodies.items():
            try:
                body()
            except Exception:
                failed[name] = traceback.format_exc()
    return {"ran": list(bodies), "failed": failed}


def main(answers: str, cases: str) -> None:
    """Of each of ``cases``, JSON [[number of ranks, function, arguments], ...]."""
    found = [
        run_ranks(ranks, globals()[name], **arguments)[0] for ranks, name, arguments in json.loads(cases)
    ]
    torch.save(found, answers)
