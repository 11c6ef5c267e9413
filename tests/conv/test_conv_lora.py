"""LoRA adapters of Megatron: merged, or exported for PEFT."""

import json
from contextlib import closing

import pytest
import torch
from conv_models import assert_same_tensors, rewrite, save_adapters, save_model, tensors_of
from typer.testing import CliRunner

from checkpoints_conv.formats.safetensors_writer import SafetensorsWriter
from checkpoints_conv.formats.torch_dist import TorchDistReader
from checkpoints_conv.hf_to_megatron import hf_to_megatron
from checkpoints_conv.inspect import summarize
from checkpoints_conv.lora import export_adapter, merge_lora
from checkpoints_conv.megatron_to_hf import megatron_to_hf
from checkpoints_conv.verify import verify
from nemo_grpo import UserError
from nemo_grpo.cli.convert import app
from nemo_grpo.models import family_for
from nemo_grpo.support.model_folder import hf_config

RANK, ALPHA, LAYERS = 3, 6, 4
LINEARS = {  # Megatron's layer -> (out, in) of the models in conv_models
    "self_attention.linear_qkv": (64, 32),
    "self_attention.linear_proj": (32, 32),
    "mlp.linear_fc1": (128, 32),
    "mlp.linear_fc2": (32, 64),
}


@pytest.fixture
def adapters():
    torch.manual_seed(1)
    return {
        name: (torch.randn(LAYERS, RANK, columns), torch.randn(LAYERS, rows, RANK))
        for name, (rows, columns) in LINEARS.items()
    }


@pytest.fixture
def checkpoint(adapters, tmp_path):
    return save_adapters(adapters, tmp_path / "lora", RANK, ALPHA)


DELTA_NET_LAYERS = {
    "3.self_attention.linear_qkv": (192, 32),
    "3.self_attention.linear_proj": (32, 64),
    "0.self_attention.out_proj": (32, 24),
    "2.mlp.linear_fc1": (128, 32),
}


def in_pieces(family, tensors):
    """The tensors with those that Megatron stores in parts taken apart."""
    split = {}
    for name, tensor in tensors.items():
        whole = [piece for piece in family.pieces if piece.startswith(f"{name}[")]
        parts = tensor.split([family.pieces[piece][0] for piece in whole]) if whole else [tensor]
        split |= dict(zip(whole or [name], parts, strict=True))
    return split


@pytest.mark.parametrize("name", ["qwen2", "qwen3.5"])
def test_merge_equals_merging_in_megatrons_layout(name, hf_models, adapters, tmp_path):
    """Reference: add alpha/r B A to the fused Megatron weights, then split them."""
    source, stacked = hf_models(name), name == "qwen2"
    if not stacked:  # layers of two kinds are not stacked
        adapters = {
            layer: (torch.randn(1, RANK, columns), torch.randn(1, rows, RANK))
            for layer, (rows, columns) in DELTA_NET_LAYERS.items()
        }
    lora = save_adapters(adapters, tmp_path / "adapters", RANK, ALPHA, stacked=stacked)
    family, hf = family_for(hf_config(source)), tensors_of(source)
    megatron = dict(family.to_megatron(in_pieces(family, hf)))
    for layer, (a, b) in adapters.items():
        for i in range(len(a)):
            key = f"decoder.layers.{i}.{layer}.weight" if stacked else f"decoder.layers.{layer}.weight"
            megatron[key] = megatron[key] + ALPHA / RANK * b[i] @ a[i]
    expected = dict(family.to_hf(megatron))
    found = tensors_of(merge_lora(lora, source, tmp_path / "merged", max_shard_bytes=20_000))
    assert set(found) == set(hf)
    for tensor in expected.keys() & hf.keys():
        torch.testing.assert_close(found[tensor], expected[tensor], rtol=1e-5, atol=1e-5)
    changed = {tensor for tensor in hf if not torch.equal(found[tensor], hf[tensor])}
    assert changed <= expected.keys()
    assert len(changed) == (7 * LAYERS if stacked else 7)
    assert (tmp_path / "merged" / "chat_template.jinja").exists()
    assert not (tmp_path / "merged" / "SHA256SUMS").exists()  # only on request


def test_adapter_folder_gives_the_merged_weights_by_pefts_formula(source, checkpoint, tmp_path):
    folder = export_adapter(checkpoint, source, tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", RANK, ALPHA)
    modules = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert config["target_modules"] == modules
    assert config["base_model_name_or_path"] == source.name  # no path of this machine
    assert [path.name for path in folder.glob("*.safetensors")] == ["adapter_model.safetensors"]
    tensors, weights = tensors_of(folder), tensors_of(source)
    merged = tensors_of(merge_lora(checkpoint, source, tmp_path / "merged"))
    assert len(tensors) == 2 * LAYERS * len(modules)
    for name in weights:
        prefix = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        if f"{prefix}A.weight" in tensors:
            delta = ALPHA / RANK * tensors[f"{prefix}B.weight"] @ tensors[f"{prefix}A.weight"]
            torch.testing.assert_close(merged[name], weights[name] + delta, rtol=1e-5, atol=1e-5)
        else:
            assert_same_tensors({name: merged[name]}, {name: weights[name]})


def test_adapters_are_not_dropped_silently(hf_models, checkpoint, megatron_checkpoints, tmp_path):
    base = hf_models("qwen2")
    with pytest.raises(UserError, match="has LoRA adapters; use --lora merge or --lora adapter"):
        megatron_to_hf(checkpoint, base, tmp_path / "out")
    with pytest.raises(UserError, match="has no LoRA adapters"):
        merge_lora(megatron_checkpoints("qwen2"), base, tmp_path / "out", alpha=1.0)
    with pytest.raises(UserError, match=r"linear_qkv.adapter.* the base says"):
        merge_lora(checkpoint, hf_models("qwen3"), tmp_path / "out")
    with pytest.raises(UserError, match=r"Qwen2_5_VL.* has no PEFT names; use --lora merge"):
        export_adapter(checkpoint, hf_models("qwen2.5-vl"), tmp_path / "out")


@pytest.mark.parametrize(
    ("family", "layer", "shape", "is_applied"),
    [
        ("deepseek-v3", "0.mlp.linear_fc2", (32, 64), False),
        ("deepseek-v3", "3.self_attention.linear_kv_up_proj", (96, 20), True),
        ("glm-4.5", "2.mlp.shared_experts.linear_fc2", (32, 16), False),
        ("glm-4.5", "2.mlp.router", (4, 32), False),
        ("glm-4.5", "2.self_attention.linear_proj", (32, 64), True),
        ("qwen3-moe", "mlp.router", (4, 32), True),
        ("gpt-oss", "mlp.router", (4, 32), False),
    ],
)
def test_adapters_that_peft_would_lose_are_refused(family, layer, shape, is_applied, hf_models, tmp_path):
    """Each was loaded with PEFT 0.21.2: the logits are the merged model's to 1e-5, or not at all."""
    layers, (rows, columns) = 1 if layer[0].isdigit() else LAYERS, shape
    pair = {layer: (torch.ones(layers, RANK, columns), torch.ones(layers, rows, RANK))}
    trained = save_adapters(pair, tmp_path / "lora", RANK, ALPHA, stacked=layers == LAYERS)
    if is_applied:
        assert export_adapter(trained, hf_models(family), tmp_path / "out").exists()
        return
    with pytest.raises(UserError, match=r"PEFT does not apply adapters below mlp\. .*; use --lora merge"):
        export_adapter(trained, hf_models(family), tmp_path / "out")
    merge_lora(trained, hf_models(family), tmp_path / "out")


def test_alpha_must_be_known(source, checkpoint, tmp_path):
    (checkpoint / "iter_0000010" / "run_config.yaml").unlink()
    with pytest.raises(UserError, match="give it with --lora-alpha"):
        merge_lora(checkpoint, source, tmp_path / "out")
    args = ["megatron-to-hf", "--megatron-checkpoint", str(checkpoint), "--hf-config", str(source)]
    args += ["--output", str(tmp_path / "out"), "--lora", "adapter"]
    result = CliRunner().invoke(app, [*args, "--base", str(source), "--hf-config", "/nonexistent"])
    assert "/nonexistent has no config.json" in str(result.exception)
    result = CliRunner().invoke(app, args)
    assert "--lora and --base belong together" in str(result.exception)
    args += ["--base", str(source), "--lora-alpha", "16"]
    assert CliRunner().invoke(app, args).exit_code == 0
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["lora_alpha"] == 16


def test_alpha_is_a_finite_number(source, checkpoint, tmp_path):
    told = {"peft: [4]": "run_config.yaml: peft is not a mapping; restore it"}
    for alpha in ("[32]", "abc", ".nan", "-.inf", "true", "9" * 400):
        told[f"peft: {{alpha: {alpha}}}"] = r"peft\.alpha is .*, no finite number; give .* with --lora-alpha"
    for text, message in told.items():
        (checkpoint / "iter_0000010" / "run_config.yaml").write_text(text)
        with pytest.raises(UserError, match=message):
            merge_lora(checkpoint, source, tmp_path / "out")
    with pytest.raises(UserError, match="lora-alpha is nan, no finite"):
        merge_lora(checkpoint, source, tmp_path / "out", alpha=float("nan"))


def say(checkpoint, peft):
    (checkpoint / "iter_0000010" / "run_config.yaml").write_text(f"peft: {json.dumps(peft)}")


def test_rank_stabilized_adapters_are_scaled_by_the_root_of_the_rank(source, checkpoint, tmp_path):
    """6 / sqrt(3) instead of 6 / 3; PEFT's lora_alpha / r is the same with lora_alpha = 6 sqrt(3)."""
    say(checkpoint, {"alpha": ALPHA, "dim": RANK, "use_rslora": True})
    merged = tensors_of(merge_lora(checkpoint, source, tmp_path / "merged"))
    adapter = export_adapter(checkpoint, source, tmp_path / "adapter")
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["lora_alpha"] / config["r"] == pytest.approx(ALPHA / 3**0.5, rel=1e-12)
    name, prefix = "model.layers.2.mlp.up_proj", "base_model.model."
    a, b = (tensors_of(adapter)[f"{prefix}{name}.lora_{x}.weight"] for x in "AB")
    expected = tensors_of(source)[f"{name}.weight"] + ALPHA / 3**0.5 * b @ a
    torch.testing.assert_close(merged[f"{name}.weight"], expected, rtol=1e-5, atol=1e-5)
    say(checkpoint, {"alpha": ALPHA, "use_rslora": "yes"})
    with pytest.raises(UserError, match=r"peft\.use_rslora is 'yes', not true or false"):
        merge_lora(checkpoint, source, tmp_path / "out")


@pytest.mark.parametrize("kind", ["dora.DoRA", "canonical_lora.CanonicalLoRA"])
def test_adapters_of_another_kind_or_rank_are_refused(kind, source, checkpoint, tmp_path):
    say(checkpoint, {"_target_": f"megatron.bridge.peft.{kind}", "alpha": ALPHA})
    with pytest.raises(UserError, match=rf"peft\._target_ is {kind.rpartition('.')[2]}, and only LoRA and"):
        merge_lora(checkpoint, source, tmp_path / "out")
    say(checkpoint, {"alpha": ALPHA, "dim": 8})
    with pytest.raises(UserError, match=r"peft\.dim is 8, but .* has rank 3; restore the file"):
        export_adapter(checkpoint, source, tmp_path / "out")
    say(checkpoint, {"_target_": "megatron.bridge.peft.lora.LoRA", "alpha": ALPHA, "dim": RANK})
    merge_lora(checkpoint, source, tmp_path / "out")


def test_verify_names_what_it_cannot_compare(source, checkpoint):
    with pytest.raises(UserError, match=r"has LoRA adapters; verify compares whole models; .*--lora merge"):
        verify(source, checkpoint)


def test_paths_may_be_texts(source, checkpoint, tmp_path):
    megatron = hf_to_megatron(str(source), str(tmp_path / "megatron"))
    back = megatron_to_hf(str(megatron), str(source), str(tmp_path / "back"))
    assert not verify(str(back), str(megatron)).different
    base = str(source)
    for export in (merge_lora, export_adapter):
        output = str(tmp_path / export.__name__)
        assert export(str(checkpoint), base, output, hf_config_folder=base) == tmp_path / export.__name__
    assert summarize(str(back)).values["num_tensors"] == len(tensors_of(source))


def stored_in(folder):
    """Every weight of a Megatron checkpoint, by its key."""
    with closing(TorchDistReader(folder)) as reader:
        return {
            name: reader.read(name, (0,) * len(key.shape), key.shape) for name, key in reader.weights.items()
        }


EXPORTS = pytest.mark.parametrize("export", [merge_lora, export_adapter])


def test_a_merged_models_config_and_tokenizer_come_from_hf_config(source, checkpoint, tmp_path):
    """A run saves its own, with ``hf_config_overrides``."""
    step = tmp_path / "tokenizer"
    step.mkdir()
    overridden = hf_config(source) | {"max_position_embeddings": 77}
    (step / "config.json").write_text(json.dumps(overridden))
    (step / "chat_template.jinja").write_text("{{ trained }}")
    merged = merge_lora(checkpoint, source, tmp_path / "merged", hf_config_folder=step)
    assert hf_config(merged)["max_position_embeddings"] == 77
    assert (merged / "chat_template.jinja").read_text() == "{{ trained }}"


@EXPORTS
def test_hf_config_is_of_the_adapted_model(export, source, hf_models, checkpoint, tmp_path):
    for other, message in (
        (hf_models("qwen3"), "is qwen3, not qwen2; give the adapted model's, or leave --hf-config out"),
        (save_model("qwen2", tmp_path / "wide", intermediate_size=72), r"is \(72, 32\), not \(64, 32\)"),
        (tmp_path / "absent", "absent has no config.json"),
    ):
        with pytest.raises(UserError, match=message):
            export(checkpoint, source, tmp_path / "out", hf_config_folder=other)
    said = "model: {rotary_base: 5.0}\npeft: {alpha: 6}"
    (checkpoint / "iter_0000010" / "run_config.yaml").write_text(said)
    overridden = hf_config(source) | {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}
    (tmp_path / "config.json").write_text(json.dumps(overridden))
    export(checkpoint, source, tmp_path / "out", hf_config_folder=tmp_path)


@EXPORTS
def test_what_was_trained_beside_the_adapters_is_refused(export, source, adapters, tmp_path):
    norm, unknown = "decoder.final_layernorm.weight", "decoder.layers.mlp.linear_fc2.linear_in.weight"
    for key, tensor in {norm: torch.full((32,), 7.0), unknown: torch.zeros(LAYERS, RANK, 64)}.items():
        trained = save_adapters(adapters, tmp_path / key, RANK, ALPHA, beside={key: tensor})
        with pytest.raises(UserError, match=rf"would lose it: {key}; give the base that was adapted, or"):
            export(trained, source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@EXPORTS
def test_the_frozen_base_beside_the_adapters_is_compared(
    export, source, adapters, megatron_checkpoints, checkpoint, tmp_path
):
    frozen = stored_in(megatron_checkpoints("qwen2"))
    whole = save_adapters(adapters, tmp_path / "whole", RANK, ALPHA, beside=frozen)
    alone = export(checkpoint, source, tmp_path / "alone")
    assert_same_tensors(tensors_of(export(whole, source, tmp_path / "same")), tensors_of(alone))
    frozen["decoder.layers.mlp.linear_fc2.weight"][2, 31, 63] += 1
    changed = save_adapters(adapters, tmp_path / "changed", RANK, ALPHA, beside=frozen)
    with pytest.raises(UserError, match=r"would lose it: decoder.layers.mlp.linear_fc2.weight; give"):
        export(changed, source, tmp_path / "out")


@EXPORTS
def test_resumption_with_a_changed_base_is_refused(export, checkpoint, tmp_path, monkeypatch):
    base = save_model("qwen2", tmp_path / "base")
    with monkeypatch.context() as patch:
        patch.setattr(SafetensorsWriter, "write_index", lambda _self: 1 / 0)  # all tensors are written
        with pytest.raises(ZeroDivisionError):
            export(checkpoint, base, tmp_path / "out")
    rewrite(base, lambda tensors: tensors["model.norm.weight"].add_(1))
    with pytest.raises(UserError, match=r"--resume .*: base changed since the first attempt; use the same"):
        export(checkpoint, base, tmp_path / "out", resume=True)


@EXPORTS
def test_the_base_fits_its_config_and_the_checkpoint(export, source, checkpoint, tmp_path):
    """As `hf_to_megatron` and `megatron_to_hf` have it."""
    said = "model: {rotary_base: 5.0}\npeft: {alpha: 6}"
    (checkpoint / "iter_0000010" / "run_config.yaml").write_text(said)
    with pytest.raises(UserError, match=r"run_config.yaml has rotary_base=5.0, .*rope_theta"):
        export(checkpoint, source, tmp_path / "out")
    short = save_model("qwen2", tmp_path / "short")
    rewrite(short, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(UserError, match=r"do not fit config.json; missing: model.norm.weight"):
        export(checkpoint, short, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("rows", [None, 96, 104])
def test_a_stored_copy_of_tied_embeddings_is_one(rows, checkpoint, megatron_checkpoints, tmp_path):
    def store(tensors):
        tensors["lm_head.weight"] = torch.tensor(1.0) if rows is None else torch.zeros(rows, 32)

    tied = save_model("qwen2-tied", tmp_path / "tied")
    rewrite(tied, store)
    for read in (
        lambda: merge_lora(checkpoint, tied, tmp_path / "out"),
        lambda: export_adapter(checkpoint, tied, tmp_path / "out"),
        lambda: hf_to_megatron(tied, tmp_path / "out"),
        lambda: verify(tied, megatron_checkpoints("qwen2-tied")),
    ):
        with pytest.raises(UserError, match="the output layer differs from the embedding"):
            read()
