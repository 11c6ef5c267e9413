"""LoRA: against plain torch on a transformers model, at every layout, through checkpoints and exports."""

import json
import shutil
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import run_ranks, slow_but
from safetensors.torch import load_file
from small_runs import AT_THE_ENDS, QUICKSTART, arguments, begin, rows
from test_megatron_policy import (
    assert_reference_comes_and_goes,
    assert_resumes_exactly,
    scheduled,
    textbook_update,
)
from torch.distributed.checkpoint import FileSystemReader
from torch.nn.utils.parametrize import register_parametrization
from toy_policies import (
    FULL_RECOMPUTE,
    LAYOUTS,
    SETTINGS,
    UNSHARDED,
    assert_equal,
    hf_model,
    policy_of,
    step,
    train,
    weights_of,
)

from nemo_grpo import UserError
from nemo_grpo.engine import loop
from nemo_grpo.engine.megatron.lora import LoRASettings
from nemo_grpo.engine.megatron.policy import MegatronPolicy
from nemo_grpo.engine.megatron.policy_checkpoint import begin_save, load_policy
from nemo_grpo.engine.saving import export_policy
from nemo_grpo.recipe import load_recipe
from nemo_grpo.recipe.layout import Layout
from nemo_grpo.recipe.megatron_sections import MegatronOptimizer
from nemo_grpo.support.model_card import Training

LORA = LoRASettings(dim=4, alpha=6)
lora_policy = partial(policy_of, lora=LORA, seed=3)


@pytest.fixture(scope="module")
def model():
    return hf_model()


def test_training_starts_at_the_base_model(model):
    policy, plain = lora_policy(model), policy_of(model)
    assert_equal(weights_of(policy), weights_of(plain))
    score = partial(MegatronPolicy.score, sequences=step()[0], micro_batch_size=6, temperature=1.0)
    assert_equal(score(policy), score(plain))


class Update(torch.nn.Module):
    """W -> W + 6 / 4 B A."""

    def __init__(self, a: torch.nn.Parameter, b: torch.nn.Parameter) -> None:
        super().__init__()
        self.a, self.b = a, b

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + 1.5 * self.b @ self.a


def give_adapters(model: torch.nn.Module, peft: dict[str, torch.Tensor]) -> list[torch.nn.Parameter]:
    """Adapters on a transformers model, from their values; q, k, v share A, so do gate and up."""
    model.requires_grad_(False)
    shared: dict[int, torch.nn.Parameter] = {}
    parameters = []
    for name in [name for name in peft if name.endswith("lora_A.weight")]:
        path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        a = shared.setdefault(peft[name].data_ptr(), torch.nn.Parameter(peft[name].clone()))
        b = torch.nn.Parameter(peft[name.replace("lora_A", "lora_B")].clone())
        register_parametrization(model.get_submodule(path), "weight", Update(a, b))
        parameters.append(b)
    return [*parameters, *shared.values()]


@pytest.mark.parametrize("family", ["qwen2-tied", "qwen3"])
def test_two_updates_equal_plain_torch(family):
    """Two: while B is zero, A has no gradient, and Adam's betas do not tell."""
    settings = SETTINGS.model_copy(update={"adam_beta1": 0.8, "adam_beta2": 0.95})
    policy, reference = lora_policy(hf_model(family), settings), hf_model(family)
    parameters = give_adapters(reference, policy.adapters.peft_tensors())
    assert len(parameters) == 2 * (4 + 7)  # per layer four A, seven B
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, betas=(0.8, 0.95), eps=1e-4, weight_decay=0.1)
    for result in train(policy, 2):
        textbook_update(reference, optimizer, result)
    adapted = {  # as the parametrized modules compute them
        f"{path}.weight": module.weight.detach()
        for path, module in reference.named_modules()
        if hasattr(module, "parametrizations")
    }
    start, found = hf_model(family).state_dict(), weights_of(policy)
    expected = {name: adapted.get(name, start[name]) for name in found}
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
    assert {name for name, tensor in found.items() if not torch.equal(tensor, start[name])} == set(adapted)


def test_the_reference_is_the_base_and_the_base_never_changes(model):
    policy = lora_policy(model)
    base = {name: p.clone() for name, p in policy.model.named_parameters() if "adapter" not in name}
    assert_reference_comes_and_goes(policy)
    assert policy.reference is None
    parameters = dict(policy.model.named_parameters())
    assert_equal({name: parameters[name].data for name in base}, base)
    assert not any(parameters[name].requires_grad for name in base)
    trained = sum(p.numel() for group in policy.optimizer.param_groups for p in group["params"])
    assert trained == sum(p.numel() for p in policy.adapters.local_parameters().values())


def test_only_chosen_layers_are_adapted(model):
    lora = LoRASettings(4, 6, ("linear_qkv",))
    policy, start = lora_policy(model, lora=lora), model.state_dict()
    train(policy)
    changed = {name for name, tensor in policy.named_tensors() if not torch.equal(tensor, start[name])}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "k_proj", "v_proj"}


def test_recomputing_activations_changes_nothing(model):
    plain, recomputed = lora_policy(model), lora_policy(model, config_fields=FULL_RECOMPUTE)
    assert recomputed.config.recompute_granularity == "full"
    for have, want in zip(train(recomputed, 2), train(plain, 2), strict=True):
        assert have.grad_norm == pytest.approx(want.grad_norm, rel=1e-5)
    torch.testing.assert_close(weights_of(recomputed), weights_of(plain), rtol=1e-5, atol=1e-6)


def trained(layout: Layout, family: str, *sections: MegatronOptimizer) -> dict[str, Any]:
    policy = lora_policy(hf_model(family), *sections, layout=layout)
    start = {name: tensor.clone() for name, tensor in policy.adapters.peft_tensors().items()}
    results = train(policy, 2)
    sequences, _ = step()
    with policy.reference_weights():
        reference, _ = policy.score(sequences, micro_batch_size=3, temperature=1.0)
    return {
        "start": start,
        "updates": [(r.metrics["loss/total"], r.grad_norm) for r in results],
        "reference": reference,
        "weights": weights_of(policy),
        "adapters": {name: tensor.clone() for name, tensor in policy.adapters.peft_tensors().items()},
    }


@cache
def alone(family: str) -> dict[str, Any]:
    return trained(Layout(), family)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert_equal(found["start"], expected["start"])
    for have, want in zip(found["updates"], expected["updates"], strict=True):
        assert have == pytest.approx(want, rel=1e-5, abs=1e-6)
    for part in ("reference", "weights", "adapters"):
        torch.testing.assert_close(found[part], expected[part], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", slow_but(["tp2-sp", "pp2", "tp2-cp2-sp", "dp2-pp2"], "tp2-sp"))
def test_every_layout_trains_the_same_adapters(name):
    """Between them every dimension; the quick one with head norms and an undistributed optimizer."""
    world_size, layout = LAYOUTS[name]
    family, *optimizer = ("qwen3", UNSHARDED) if name == "tp2-sp" else ("qwen2-tied",)
    for found in run_ranks(world_size, trained, layout, family, *optimizer):
        assert_same(found, alone(family))


@pytest.mark.parametrize(
    ("distributed", "dtype"), [(True, torch.float32), (False, torch.float32), (True, torch.bfloat16)]
)
def test_a_checkpoint_holds_the_adapters_alone_and_resumes_exactly(model, tmp_path, distributed, dtype):
    sections = scheduled(distributed)
    unbroken = lora_policy(model, *sections, dtype=dtype)
    other = lora_policy(model, *sections, dtype=dtype, seed=99)  # other adapters, to be replaced
    assert_resumes_exactly(unbroken, other, tmp_path / "weights")

    saved = FileSystemReader(str(tmp_path / "weights")).read_metadata().state_dict_metadata
    tensors = {name for name, kind in saved.items() if hasattr(kind, "size")}
    layers = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    ends = ("linear_in.weight", "linear_out.weight")
    keys = {f"decoder.layers.{layer}.adapter.{end}" for layer in layers for end in ends}
    assert {name for name in tensors if not name.startswith("optimizer.")} == keys
    assert all(name.endswith(tuple(keys)) for name in tensors)
    assert (tmp_path / "weights/run_config.yaml").read_text() == "peft:\n  dim: 4\n  alpha: 6\n"
    assert tuple(saved["decoder.layers.mlp.linear_fc1.adapter.linear_out.weight"].size) == (2, 128, 4)


@pytest.mark.parametrize(
    "lora", [None, LoRASettings(8, 6), LoRASettings(4, 8), LoRASettings(4, 6, ("linear_qkv",))]
)
def test_a_checkpoint_of_other_adapters_is_refused(model, tmp_path, lora):
    begin_save(lora_policy(model), tmp_path / "weights", 1).finish()
    with pytest.raises(UserError, match="resume with the same ones"):
        load_policy(lora_policy(model, lora=lora), tmp_path / "weights")


RUN = ["grpo.max_num_steps=2", *AT_THE_ENDS, "loss_fn.variant=erpo"]
RUN += ["policy.megatron_cfg.peft={enabled: true, dim: 4, alpha: 8}"]
RUN += ["policy.megatron_cfg.scheduler.lr_decay_style=constant"]


@pytest.fixture
def lora_recipe(recipe):
    return partial(recipe, *RUN)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The parts of a run that has ended."""
    exact = "nemo_grpo.export.dtype=float32"
    parts = begin(load_recipe(QUICKSTART, arguments(tmp_path_factory.mktemp("whole"), "run", *RUN, exact)))
    loop.train(parts)
    return parts


def test_a_run_exports_the_merged_model_and_the_adapters_apart(whole):
    folder = whole.recorder.folder
    source = whole.recorder.saver.source
    base, merged = (load_file(path / "model.safetensors") for path in (source, folder.hf))
    adapter = load_file(folder.hf_adapter / "adapter_model.safetensors")
    config = json.loads((folder.hf_adapter / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8)
    names = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert config["target_modules"] == names
    assert config["base_model_name_or_path"] == source.name
    assert len(adapter) == 2 * 2 * 7
    changed = 0
    for name, weight in base.items():
        key = f"base_model.model.{name.removesuffix('.weight')}"
        weight = weight.float()  # the base is in bfloat16
        expected = weight
        if f"{key}.lora_A.weight" in adapter:
            expected = weight + 2.0 * adapter[f"{key}.lora_B.weight"] @ adapter[f"{key}.lora_A.weight"]
            changed += not torch.equal(merged[name], weight)
        torch.testing.assert_close(merged[name], expected, rtol=1e-6, atol=1e-6, msg=name)
    assert changed == 14
    assert rows(folder.path)[-1]["mismatch/logprob_abs_mean"] < 1e-5  # the sampler has the merged weights


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_merged_model_has_the_dtype_of_its_base(whole, tmp_path, dtype):
    base = tmp_path / "base"
    shutil.copytree(whole.recorder.saver.source, base)
    config = json.loads((base / "config.json").read_text())
    config.pop("torch_dtype", None)
    (base / "config.json").write_text(json.dumps(config | {"dtype": str(dtype).removeprefix("torch.")}))
    folder = SimpleNamespace(hf=tmp_path / "hf", hf_adapter=tmp_path / "adapter", leads=True)
    export_policy(whole.learner.policy, base, folder, None, Training())
    exact = load_file(whole.recorder.folder.hf / "model.safetensors")
    assert_equal(load_file(folder.hf / "model.safetensors"), {n: t.to(dtype) for n, t in exact.items()})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("target_modules=[linear_q]", "did you mean 'linear_qkv'"),
        ("exclude_modules=[output_layer]", "cannot adapt 'output_layer'"),
        ("target_modules=[linear_fc1]; exclude_modules=[linear_fc1]", "leaves no layer to adapt"),
    ],
)
def test_what_lora_cannot_do_is_refused_before_anything_is_made(lora_recipe, overrides, message):
    lines = [f"policy.megatron_cfg.peft.{line}" for line in overrides.split("; ")]
    with pytest.raises(UserError, match=message):
        begin(lora_recipe(*lines))
    assert not lora_recipe().run_dir.exists()
