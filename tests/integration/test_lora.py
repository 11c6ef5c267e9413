"""LoRA: against plain torch on a transformers model, at every layout, through checkpoints and exports."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks, slow_but
from safetensors.torch import load_file
from test_megatron_policy import step, textbook_logprobs, token_batch
from test_parallel import hf_model
from test_train import ROOT, arguments, rows
from torch.nn.utils.parametrize import register_parametrization

from nemo_grpo import UserError, build_objective, global_counts
from nemo_grpo.engine.megatron import policy as policy_module
from nemo_grpo.engine.megatron.checkpoint import begin_save, load_policy
from nemo_grpo.engine.megatron.lora import LoRASettings, choose_targets
from nemo_grpo.engine.megatron.model import transformer_config
from nemo_grpo.engine.megatron.policy import MegatronPolicy
from nemo_grpo.engine.trainer import Trainer
from nemo_grpo.recipe import load_recipe
from nemo_grpo.recipe.layout import Layout
from nemo_grpo.recipe.megatron_sections import MegatronOptimizer, MegatronScheduler

SETTINGS = MegatronOptimizer(lr=1e-2, weight_decay=0.1, adam_eps=1e-4, clip_grad=0.05)
LORA = LoRASettings(dim=4, alpha=6)
LAYOUTS = {
    "tp2": (2, Layout(tensor=2)),
    "tp2-sp": (2, Layout(tensor=2, sequence_parallel=True)),
    "pp2": (2, Layout(pipeline=2)),
    "cp2": (2, Layout(context=2)),
    "dp2": (2, Layout()),
    "tp2-pp2": (4, Layout(tensor=2, pipeline=2)),
    "tp2-cp2-sp": (4, Layout(tensor=2, context=2, sequence_parallel=True)),
}
PEFT = ["policy.megatron_cfg.peft={enabled: true, dim: 4, alpha: 8}"]


def policy_of(model, layout=None, sections=(SETTINGS,), lora=LORA, **more):
    policy = MegatronPolicy(model.config, *sections, layout=layout, lora=lora, **{"seed": 3} | more)
    policy.load_weights(dict(model.state_dict()), keep_reference=True)
    return policy


def train(policy: MegatronPolicy, num_updates: int) -> list[Any]:
    """Updates by GRPO on one step's sequences."""
    sequences, rewards = step(rows=8)
    objective, results = build_objective("grpo"), []
    for _ in range(num_updates):
        prev, _ = policy.score(sequences, micro_batch_size=3, temperature=1.0)
        prepared = objective.prepare(token_batch(sequences, rewards, prev))
        results.append(policy.update(objective, prepared, sequences, micro_batch_size=2, temperature=1.0))
    return results


def weights_of(policy: MegatronPolicy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.named_tensors()}


@pytest.fixture(scope="module")
def model():
    return hf_model("qwen2-tied", 2)


# ---------------------------------------------------------------------- values


def test_training_starts_at_the_base_model(model):
    policy = policy_of(model)
    for name, tensor in policy.named_tensors():
        assert torch.equal(tensor, model.state_dict()[name]), name
    sequences, _ = step()
    logprobs, _ = policy.score(sequences, micro_batch_size=6, temperature=1.0)
    plain, _ = policy_of(model, lora=None).score(sequences, micro_batch_size=6, temperature=1.0)
    assert torch.equal(logprobs, plain)


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
    """Two: while B is zero, A has no gradient."""
    policy, reference = policy_of(hf_model(family, 2)), hf_model(family, 2)
    parameters = give_adapters(reference, policy.adapters.peft_tensors())
    assert len(parameters) == 2 * (4 + 7)  # per layer four A, seven B
    results = train(policy, 2)

    sequences, rewards = step(rows=8)
    objective = build_objective("grpo")
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4, weight_decay=0.1)
    for result in results:
        current = textbook_logprobs(reference, sequences)[0]
        prepared = objective.prepare(token_batch(sequences, rewards, current.detach()))
        toks, seqs = global_counts(prepared.batch)
        part = prepared.select(slice(None), next_token_logprobs=current)
        loss, _ = objective.loss(part, global_valid_toks=toks, global_valid_seqs=seqs)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.05)
        optimizer.step()
        assert norm > 0.05  # clipping acts
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-4)
        assert result.metrics["loss/total"] == pytest.approx(loss.item(), abs=1e-6)
    expected = {  # as the parametrized modules compute them
        f"{path}.weight": module.weight.detach()
        for path, module in reference.named_modules()
        if hasattr(module, "parametrizations")
    }
    start = hf_model(family, 2).state_dict()
    for name, tensor in policy.named_tensors():
        torch.testing.assert_close(tensor, expected.get(name, start[name]), rtol=1e-4, atol=2e-5, msg=name)
    changed = [name for name, tensor in policy.named_tensors() if not torch.equal(tensor, start[name])]
    assert sorted(changed) == sorted(expected)


def test_the_reference_is_the_base_and_the_base_never_changes(model):
    policy, (sequences, _) = policy_of(model), step()
    base = {name: p.clone() for name, p in policy.model.named_parameters() if "adapter" not in name}
    before, _ = policy.score(sequences, micro_batch_size=6, temperature=1.0)
    train(policy, 2)
    after, _ = policy.score(sequences, micro_batch_size=6, temperature=1.0)
    with policy.reference_weights():
        reference, _ = policy.score(sequences, micro_batch_size=6, temperature=1.0)
    again, _ = policy.score(sequences, micro_batch_size=6, temperature=1.0)
    assert policy.reference is None
    assert torch.equal(reference, before)
    assert not torch.equal(after, before)
    assert torch.equal(again, after)
    parameters = dict(policy.model.named_parameters())
    for name, tensor in base.items():
        assert torch.equal(parameters[name], tensor), name
        assert not parameters[name].requires_grad, name
    trained = sum(p.numel() for group in policy.optimizer.param_groups for p in group["params"])
    assert trained == sum(p.numel() for p in policy.adapters.local_parameters().values())


def test_only_chosen_layers_are_adapted(model):
    lora = LoRASettings(4, 6, choose_targets(["linear_qkv", "linear_fc1"], ["linear_fc1"]))
    policy = policy_of(model, lora=lora)
    train(policy, 1)
    changed = {
        name.split(".")[-2]
        for name, tensor in policy.named_tensors()
        if not torch.equal(tensor, model.state_dict()[name])
    }
    assert changed == {"q_proj", "k_proj", "v_proj"}


def test_recomputing_activations_changes_nothing(model, monkeypatch):
    plain = policy_of(model)
    expected = train(plain, 2)
    fields = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    monkeypatch.setattr(policy_module, "transformer_config", partial(transformer_config, **fields))
    recomputed = policy_of(model)
    assert recomputed.config.recompute_granularity == "full"
    for have, want in zip(train(recomputed, 2), expected, strict=True):
        assert have.grad_norm == pytest.approx(want.grad_norm, rel=1e-5)
    for (name, tensor), (_, want) in zip(recomputed.named_tensors(), plain.named_tensors(), strict=True):
        torch.testing.assert_close(tensor, want, rtol=1e-5, atol=1e-6, msg=name)


# ---------------------------------------------------------------------- layouts


def trained(layout: Layout, family: str, distributed: bool) -> dict[str, Any]:
    settings = MegatronOptimizer(
        lr=1e-2, weight_decay=0.1, adam_eps=1e-4, clip_grad=0.05, use_distributed_optimizer=distributed
    )
    policy = policy_of(hf_model(family, 2), layout, (settings,))
    start = {name: tensor.clone() for name, tensor in policy.adapters.peft_tensors().items()}
    results = train(policy, 2)
    sequences, _ = step(rows=8)
    with policy.reference_weights():
        reference, _ = policy.score(sequences, micro_batch_size=3, temperature=1.0)
    return {
        "start": start,
        "updates": [(r.metrics["loss/total"], r.grad_norm) for r in results],
        "reference": reference,
        "weights": weights_of(policy),
        "adapters": {name: tensor.clone() for name, tensor in policy.adapters.peft_tensors().items()},
    }


@pytest.fixture(scope="module")
def alone():
    return {family: trained(Layout(), family, True) for family in ("qwen2-tied", "qwen3")}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, tensor in expected["start"].items():
        assert torch.equal(found["start"][name], tensor), name
    for have, want in zip(found["updates"], expected["updates"], strict=True):
        assert have == pytest.approx(want, rel=1e-5, abs=1e-6)
    torch.testing.assert_close(found["reference"], expected["reference"], rtol=1e-5, atol=1e-5)
    for part in ("weights", "adapters"):
        assert found[part].keys() == expected[part].keys()
        for name, tensor in expected[part].items():
            torch.testing.assert_close(found[part][name], tensor, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("name", slow_but(LAYOUTS))
def test_every_layout_trains_the_same_adapters(alone, name):
    for found in run_ranks(*LAYOUTS[name][:1], trained, LAYOUTS[name][1], "qwen2-tied", True):
        assert_same(found, alone["qwen2-tied"])


def test_a_model_with_head_norms_and_an_undistributed_optimizer_too(alone):
    layout = Layout(tensor=2, sequence_parallel=True)
    assert_same(run_ranks(2, trained, layout, "qwen3", False)[0], alone["qwen3"])


# ---------------------------------------------------------------------- checkpoints


def save_after_two(layout: Layout, folder: Path) -> None:
    policy = policy_of(hf_model("qwen2-tied", 2), layout)
    train(policy, 2)
    begin_save(policy, folder, 2).finish()


def resume_two(layout: Layout, folder: Path, again: Path | None) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Load, save what was loaded, train on."""
    policy = policy_of(hf_model("qwen2-tied", 2), layout)
    load_policy(policy, folder)
    if again is not None:
        begin_save(policy, again, 2).finish()
    return train(policy, 2), weights_of(policy)


@pytest.mark.parametrize(
    ("distributed", "dtype"), [(True, torch.float32), (False, torch.float32), (True, torch.bfloat16)]
)
def test_a_checkpoint_holds_the_adapters_alone_and_resumes_exactly(model, tmp_path, distributed, dtype):
    sections = (
        MegatronOptimizer(lr=1e-2, min_lr=1e-3, weight_decay=0.0, use_distributed_optimizer=distributed),
        MegatronScheduler(lr_decay_style="linear", lr_decay_iters=5),
    )
    unbroken = policy_of(model, sections=sections, dtype=dtype)
    train(unbroken, 2)
    begin_save(unbroken, tmp_path / "weights", 2).finish()
    expected = train(unbroken, 2)
    resumed = policy_of(model, sections=sections, dtype=dtype, seed=99)  # other adapters, to be replaced
    load_policy(resumed, tmp_path / "weights")
    assert train(resumed, 2) == expected  # to the last bit
    for (name, tensor), (_, want) in zip(resumed.named_tensors(), unbroken.named_tensors(), strict=True):
        assert torch.equal(tensor, want), name

    from torch.distributed.checkpoint import FileSystemReader

    saved = FileSystemReader(str(tmp_path / "weights")).read_metadata().state_dict_metadata
    tensors = {name for name, kind in saved.items() if hasattr(kind, "size")}
    layers = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    ends = ("linear_in.weight", "linear_out.weight")
    keys = {f"decoder.layers.{layer}.adapter.{end}" for layer in layers for end in ends}
    assert {name for name in tensors if not name.startswith("optimizer.")} == keys
    assert all(name.endswith(tuple(keys)) for name in tensors)
    assert (tmp_path / "weights/run_config.yaml").read_text() == "peft:\n  dim: 4\n  alpha: 6\n"
    assert tuple(saved["decoder.layers.mlp.linear_fc1.adapter.linear_out.weight"].size) == (2, 128, 4)


@pytest.mark.parametrize("name", slow_but(["tp2-pp2", "dp2"]))
def test_a_checkpoint_resumes_at_another_layout_and_back(tmp_path, name):
    ranks, layout = LAYOUTS[name]
    save_after_two(Layout(), tmp_path / "one")
    results, weights = resume_two(Layout(), tmp_path / "one", None)
    there = run_ranks(ranks, resume_two, layout, tmp_path / "one", tmp_path / "several")[0]
    back = resume_two(Layout(), tmp_path / "several", None)
    assert back[0] == results  # nothing was lost on the way
    for other_results, other in (there, back):
        for have, want in zip(other_results, results, strict=True):
            assert have.grad_norm == pytest.approx(want.grad_norm, rel=1e-4)
        for key, tensor in weights.items():
            torch.testing.assert_close(other[key], tensor, rtol=1e-5, atol=2e-5, msg=key)


@pytest.mark.parametrize(
    "lora", [None, LoRASettings(8, 6), LoRASettings(4, 8), LoRASettings(4, 6, ("linear_qkv",))]
)
def test_a_checkpoint_of_other_adapters_is_refused(model, tmp_path, lora):
    policy = policy_of(model)
    train(policy, 1)
    begin_save(policy, tmp_path / "weights", 1).finish()
    with pytest.raises(UserError, match="resume with the same ones"):
        load_policy(policy_of(model, lora=lora), tmp_path / "weights")


# ---------------------------------------------------------------------- runs


def recipe_of(tmp_path: Path, cache: Path, *overrides: str) -> Any:
    steps = ["grpo.max_num_steps=2", "grpo.val_period=0", "loss_fn.variant=erpo"]
    line = [*arguments(tmp_path, cache, "run"), *steps, *PEFT, *overrides]
    return load_recipe(ROOT / "recipes/quickstart.yaml", line)


def test_a_run_exports_the_merged_model_and_the_adapters_apart(tmp_path, cache):
    trainer = Trainer(recipe_of(tmp_path, cache))
    trainer.train()
    base = load_file(trainer.source / "model.safetensors")
    merged = load_file(trainer.run.hf / "model.safetensors")
    adapter = load_file(trainer.run.hf_adapter / "adapter_model.safetensors")
    config = json.loads((trainer.run.hf_adapter / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8)
    names = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert config["target_modules"] == names
    assert len(adapter) == 2 * 2 * 7
    changed = 0
    for name, weight in base.items():
        key = f"base_model.model.{name.removesuffix('.weight')}"
        expected = weight
        if f"{key}.lora_A.weight" in adapter:
            expected = weight + 2.0 * adapter[f"{key}.lora_B.weight"] @ adapter[f"{key}.lora_A.weight"]
            changed += not torch.equal(merged[name], weight)
        torch.testing.assert_close(merged[name], expected, rtol=1e-6, atol=1e-6, msg=name)
    assert changed == 14
    assert (
        rows(trainer.run.path)[-1]["mismatch/logprob_abs_mean"] < 1e-5
    )  # the sampler has the merged weights
    assert not list(trainer.run.path.glob("tmp_*"))


def test_a_run_resumes_from_the_folder_it_started_from(tmp_path, cache):
    constant = "policy.megatron_cfg.scheduler.lr_decay_style=constant"
    whole = Trainer(recipe_of(tmp_path / "whole", cache, constant))
    whole.train()
    Trainer(recipe_of(tmp_path, cache, constant, "grpo.max_num_steps=1")).train()
    resumed = Trainer(recipe_of(tmp_path, cache, constant), resume=True)
    assert resumed.state.step == 1
    resumed.train()
    for (name, tensor), (_, want) in zip(
        resumed.policy.named_tensors(), whole.policy.named_tensors(), strict=True
    ):
        assert torch.equal(tensor, want), name


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["policy.megatron_cfg.peft.dropout=0.1"], r"peft\.dropout=0\.1"),
        (["policy.megatron_cfg.peft.lora_A_init_method=kaiming"], "use xavier"),
        (["policy.megatron_cfg.peft.lora_B_init_method=normal"], "use zero"),
        (["policy.megatron_cfg.peft.lora_dtype=bfloat16"], "use null"),
        (["policy.megatron_cfg.peft.target_modules=[linear_q]"], "did you mean 'linear_qkv'"),
        (["policy.megatron_cfg.peft.exclude_modules=[output_layer]"], "'output_layer' is no layer to adapt"),
        (
            [
                "policy.megatron_cfg.peft.target_modules=[linear_fc1]",
                "policy.megatron_cfg.peft.exclude_modules=[linear_fc1]",
            ],
            "leaves no layer to adapt",
        ),
    ],
)
def test_what_lora_cannot_do_is_refused_before_anything_is_made(tmp_path, cache, overrides, message):
    with pytest.raises(UserError, match=message):
        Trainer(recipe_of(tmp_path, cache, *overrides))
    assert not (tmp_path / "run").exists()
