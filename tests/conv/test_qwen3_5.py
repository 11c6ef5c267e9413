"""What only Qwen3.5's checkpoints have: delta nets stored in parts, gates among the queries."""

import re
import shlex
import shutil
import subprocess
import sys
from contextlib import closing

import pytest
import torch
import transformers
from conv_models import (
    assert_same_tensors,
    rewrite,
    save_adapters,
    save_model,
    shapes_in,
    tensors_of,
    write_chunk,
)
from conv_ranks import delta_net_after_a_change, on_ranks
from small_models import small_config
from typer.testing import CliRunner

from checkpoints_conv.formats.safetensors_io import SafetensorsFolder
from checkpoints_conv.formats.torch_dist_writer import TorchDistWriter
from checkpoints_conv.hf_to_megatron import hf_to_megatron
from checkpoints_conv.lora import merge_lora
from checkpoints_conv.megatron_to_hf import megatron_to_hf
from checkpoints_conv.verify import verify
from nemo_grpo import UserError
from nemo_grpo.cli.convert import app
from nemo_grpo.models import family_for
from nemo_grpo.support.model_folder import hf_config

NET = "model.layers.1.linear_attn."


def test_parts_of_a_delta_net_are_stored_by_themselves(megatron_checkpoints):
    """2 key heads of 8, 4 value heads of 6, kernel 3; layers 0 to 2 have it, layer 3 has attention."""
    shapes = shapes_in(megatron_checkpoints("qwen3.5"))
    layer = "decoder.layers.1.self_attention."
    rows = {"query": 16, "key": 16, "value": 24, "z": 24, "beta": 4, "alpha": 4}
    assert {part: shapes[f"{layer}in_proj.weight.{part}"] for part in rows} == {
        part: (count, 32) for part, count in rows.items()
    }
    assert shapes[f"{layer}conv1d.weight.value"] == (24, 1, 3)
    assert shapes[f"{layer}in_proj.layer_norm_weight"] == (32,)
    assert shapes["decoder.layers.3.self_attention.linear_qkv.weight"] == (2 * 4 * 16 + 2 * 2 * 16, 32)
    assert not any(name.startswith("decoder.layers.3.self_attention.in_proj") for name in shapes)


def test_megatron_core_loads_and_saves_a_delta_net_at_another_tp(hf_models, megatron_checkpoints, tmp_path):
    """Rank 1 of 2 has the second half of every part's rows; megatron-core then adds 1 to A_log and saves."""
    source, checkpoint = hf_models("qwen3.5"), megatron_checkpoints("qwen3.5") / "iter_0000000"
    saved = tmp_path / "saved"
    saved.mkdir()
    found = on_ranks(2, delta_net_after_a_change, source, checkpoint, saved)
    hf = tensors_of(source)
    queries, keys, values = hf[f"{NET}in_proj_qkv.weight"].split([16, 16, 24])
    parts = [queries, keys, values, *(hf[f"{NET}in_proj_{name}.weight"] for name in "zba")]
    assert torch.equal(found["in_proj.weight"], torch.cat([part.chunk(2)[1] for part in parts]))
    assert torch.equal(found["out_norm.weight"], hf[f"{NET}norm.weight"] - 1)
    assert torch.equal(found["out_proj.weight"], hf[f"{NET}out_proj.weight"].chunk(2, 1)[1])
    assert shapes_in(saved) == {
        name: shape for name, shape in shapes_in(checkpoint).items() if ".layers.1.self_attention." in name
        and "layer_norm" not in name
    }  # fmt: skip


def test_adapters_of_the_input_projection_are_refused(hf_models, tmp_path):
    """Their rows are in the order of the training's tensor parallelism."""
    pair = {"0.self_attention.in_proj": (torch.randn(1, 3, 32), torch.randn(1, 88, 3))}
    lora = save_adapters(pair, tmp_path / "lora", 3, 6, stacked=False)
    with pytest.raises(UserError, match=r"adapters of a kind that is not supported: .*in_proj\.adapter"):
        merge_lora(lora, hf_models("qwen3.5"), tmp_path / "merged")


def test_float32_numbers_are_rounded_once(hf_models, tmp_path):
    """w = 1 + 2^-9 is 1 in bf16, and w - 1 is not 0."""
    model = shutil.copytree(hf_models("qwen3.5"), tmp_path / "model")
    rewrite(model, lambda tensors: tensors[f"{NET}norm.weight"].fill_(1 + 2**-9))
    megatron = hf_to_megatron(model, tmp_path / "megatron", dtype=torch.bfloat16)
    assert not verify(model, megatron).different
    back = tensors_of(megatron_to_hf(megatron, model, tmp_path / "back", dtype=torch.float32))
    assert back[f"{NET}norm.weight"].unique().item() in (1.0, 1 + 2**-9)


VISION = {
    "depth": 2, "hidden_size": 20, "intermediate_size": 28, "num_heads": 2, "out_hidden_size": 32,
    "patch_size": 4, "num_position_embeddings": 9,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind"), [("qwen3.5", ""), pytest.param("qwen3.5-moe", "Moe", marks=pytest.mark.slow)]
)
def test_the_text_of_a_model_with_vision_converts_by_the_command_that_is_named(name, kind, tmp_path):
    text = small_config(name, num_hidden_layers=4).to_dict()
    config = getattr(transformers, f"Qwen3_5{kind}Config")(text_config=text, vision_config=VISION)
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "MODEL")
    with pytest.raises(UserError, match="its vision tower is planned, but not converted here") as error:
        hf_to_megatron(tmp_path / "MODEL", tmp_path / "megatron")
    command = shlex.split(re.search(r'python (-c ".*?")', str(error.value))[1])
    subprocess.run([sys.executable, *command], cwd=tmp_path, check=True, capture_output=True)
    megatron = hf_to_megatron(tmp_path / "TEXT", tmp_path / "megatron")
    back = megatron_to_hf(megatron, tmp_path / "TEXT", tmp_path / "back")
    load = transformers.AutoModelForCausalLM.from_pretrained
    ids = torch.arange(3, 15)[None]
    whole, text = load(tmp_path / "MODEL"), load(back)
    with torch.no_grad():
        torch.testing.assert_close(text(ids).logits, whole(ids).logits, rtol=0, atol=1e-6)


SMALL_NORM = [0.0025635, 0.0634766, 0.0161133, 0.2832031, -0.0361328, 0.2753906]
"""bf16 numbers below 0.5: in bf16, w - 1 keeps 2^-8 of them."""


def with_norms(source, folder, values, dtype):
    model = shutil.copytree(source, folder)
    scale = torch.tensor(values, dtype=dtype)
    rewrite(model, lambda tensors: tensors.update({f"{NET}norm.weight": scale}))
    return model


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5-moe"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_norms_below_one_half_return_bit_by_bit(name, dtype, tmp_path):
    source = with_norms(save_model(name, tmp_path / "plain", dtype), tmp_path / "source", SMALL_NORM, dtype)
    megatron = hf_to_megatron(source, tmp_path / "megatron")
    back = megatron_to_hf(megatron, source, tmp_path / "back")
    assert_same_tensors(tensors_of(back), tensors_of(source))
    for model in (source, back):
        found = verify(model, megatron)
        assert (found.different, found.rounded) == ({}, {})


def test_float32_norms_of_a_bf16_model_stay_float32(tmp_path):
    """Published models have them so."""
    source = save_model("qwen3.5", tmp_path / "source", torch.bfloat16)
    norms = [f"model.layers.{layer}.linear_attn.norm.weight" for layer in range(3)]
    rewrite(source, lambda tensors: tensors.update({n: tensors[n].float() + 1e-6 for n in norms}))
    megatron = hf_to_megatron(source, tmp_path / "megatron")
    back = megatron_to_hf(megatron, source, tmp_path / "back")
    assert_same_tensors(tensors_of(back), tensors_of(source))


def write_with_norm(source, folder, value):
    """A bf16 checkpoint as a trainer saves it, whose out_norm of layer 1 is ``value``, everywhere."""
    folder.mkdir()
    writer, written = TorchDistWriter(folder, 1), []
    for name, tensor in family_for(hf_config(source)).to_megatron(in_pieces_of(source)):
        name = name.replace(".local_experts", "")
        if name.endswith("layers.1.self_attention.out_norm.weight"):
            tensor = torch.full_like(tensor, value)
        written.append(write_chunk(writer, name, tuple(tensor.shape), (0,) * tensor.dim(), tensor.bfloat16()))
    writer.finish(written, [], 0)
    return folder


def in_pieces_of(source):
    """Read a model's tensors with the delta nets' matrices in the pieces of the table."""
    family = family_for(hf_config(source))
    with closing(SafetensorsFolder(source, family.pieces)) as weights:
        return {name: weights.read(name) for name in weights.tensors}


def test_a_trained_norm_that_the_models_dtype_cannot_hold_is_rounded_and_not_damaged(tmp_path):
    """Megatron has v = 0.00509644; in bf16 1 + v is 1.0078125."""
    source = save_model("qwen3.5", tmp_path / "source", torch.bfloat16)
    megatron = write_with_norm(source, tmp_path / "megatron", 0.0051)
    export = megatron_to_hf(megatron, source, tmp_path / "export")
    assert tensors_of(export)[f"{NET}norm.weight"].unique().tolist() == [1.0078125]
    result = verify(export, megatron)
    assert not result.different
    assert result.rounded == {f"{NET}norm.weight": pytest.approx(1.0078125 - 1.00509644, abs=1e-7)}
    shown = CliRunner().invoke(app, ["verify", "--hf-model", export, "--megatron-checkpoint", megatron])
    assert shown.exit_code == 0
    assert f"rounded: {NET}norm.weight (by up to 0.00272)" in shown.output
    assert "0 differ, 1 are rounded" in shown.output
    exact = megatron_to_hf(megatron, source, tmp_path / "exact", dtype="fp32")
    assert tensors_of(exact)[f"{NET}norm.weight"].unique().tolist() == [pytest.approx(1.00509644, abs=1e-8)]
    result = verify(exact, megatron)
    assert not result.rounded
    assert not result.different
    rewrite(export, lambda tensors: tensors[f"{NET}norm.weight"].fill_(1.25))
    assert set(verify(export, megatron).different) == {f"{NET}norm.weight"}


def test_a_checkpoint_that_rounded_the_norm_on_its_way_in_is_not_called_equal(tmp_path):
    """As Megatron-Bridge writes it: 0.0025635 - 1 is -0.99609375 in bf16, which exports as 0.00390625."""
    source = save_model("qwen3.5", tmp_path / "plain", torch.bfloat16)
    source = with_norms(source, tmp_path / "source", [0.0025635] * 6, torch.bfloat16)
    megatron = write_with_norm(source, tmp_path / "megatron", -0.99609375)
    result = verify(source, megatron)
    assert not result.different
    assert result.rounded == {f"{NET}norm.weight": pytest.approx(0.00390625 - 0.0025635, abs=1e-6)}
