"""Hugging Face -> Megatron -> Hugging Face on disk, and what an export must hold."""

import json
import shutil

import pytest
import torch
import yaml
from conv_models import CONFIGS, assert_same_tensors, names_in, rewrite, save_model, tensors_of, write_chunk
from safetensors.torch import save_file
from small_models import LLAMA3_ROPE, auto_class
from transformers import AutoConfig

from checkpoints_conv.formats.torch_dist_writer import TorchDistWriter
from checkpoints_conv.hf_to_megatron import hf_to_megatron
from checkpoints_conv.megatron_to_hf import megatron_to_hf
from checkpoints_conv.verify import verify
from nemo_grpo import UserError
from nemo_grpo.engine.megatron.logits import LOGITS_TOLERANCE, compare_logits
from nemo_grpo.models import family_for
from nemo_grpo.support.model_folder import hf_config


@pytest.mark.parametrize(
    ("family_name", "dtype"),
    [*((name, torch.bfloat16) for name in CONFIGS), ("qwen2", torch.float32), ("qwen2", torch.float16)],
)
def test_round_trip_is_bit_identical(family_name, dtype, tmp_path):
    source = save_model(family_name, tmp_path / "source", dtype)
    megatron = hf_to_megatron(source, tmp_path / "megatron")
    back = megatron_to_hf(megatron, source, tmp_path / "back", max_shard_bytes=20_000)
    assert len(list(back.glob("*.safetensors"))) > 3
    assert_same_tensors(tensors_of(back), tensors_of(source))
    result = verify(back, megatron)
    assert result.num_tensors == len(tensors_of(source))
    assert not result.different


def test_a_model_of_one_file_comes_back_byte_for_byte(family_name, hf_models, megatron_checkpoints, tmp_path):
    """transformers wrote the source; the order of tensors in its file is the safetensors library's."""
    source, checkpoint = hf_models(family_name), megatron_checkpoints(family_name)
    back = megatron_to_hf(checkpoint, source, tmp_path / "back")
    assert (back / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


@pytest.mark.parametrize("max_shard_bytes", [20_000, 1_000_000_000], ids=["index", "one file"])
def test_a_second_copy_of_the_weights_is_not_read(max_shard_bytes, source, checkpoint, tmp_path):
    """As in Mistral's folders, whose ``consolidated.safetensors`` has names of its own."""
    hf = megatron_to_hf(checkpoint, source, tmp_path / "hf", max_shard_bytes=max_shard_bytes)
    other = {"layers.0.attention.wq.weight": torch.zeros(2), "model.norm.weight": torch.zeros(3)}
    save_file(other, hf / "consolidated.safetensors")
    assert not verify(hf, hf_to_megatron(hf, tmp_path / "megatron")).different


def test_export_loads_and_generates_with_transformers(family_name, hf_models, megatron_checkpoints, tmp_path):
    source, checkpoint = hf_models(family_name), megatron_checkpoints(family_name)
    back = megatron_to_hf(checkpoint, source, tmp_path / "back", max_shard_bytes=20_000)
    tokens = torch.tensor([[1, 5, 9]])
    outputs = []
    for folder in (source, back):
        model = auto_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder, dtype=torch.float32)
        outputs.append(model.generate(tokens, max_new_tokens=6, do_sample=False, pad_token_id=0))
    assert torch.equal(*outputs)
    for name in ("generation_config.json", "chat_template.jinja", "tokenizer_config.json"):
        assert (back / name).read_bytes() == (source / name).read_bytes()
    assert json.loads((back / "config.json").read_text()) == json.loads((source / "config.json").read_text())


@pytest.mark.parametrize("style", ["stacked", "by layer"])
def test_other_key_styles_are_read(style, source, tmp_path):
    """Local-spec names on disk, and checkpoints that do not stack their layers."""
    folder = tmp_path / "megatron"
    folder.mkdir()
    writer, written = TorchDistWriter(folder, 1), []
    for name, tensor in family_for(hf_config(source)).to_megatron(tensors_of(source)):
        parts = name.split(".")
        key, shape, offsets = name, tuple(tensor.shape), (0,) * tensor.dim()
        if style == "stacked" and parts[1] == "layers":
            layer = int(parts.pop(2))
            key, tensor, shape, offsets = ".".join(parts), tensor[None], (4, *shape), (layer, *offsets)
        written.append(write_chunk(writer, key, shape, offsets, tensor))
    writer.finish(written, [], 0)
    back = megatron_to_hf(folder, source, tmp_path / "back")
    assert_same_tensors(tensors_of(back), tensors_of(source))


def test_checkpoint_without_common_state_file_is_read(source, checkpoint, tmp_path):
    """megatron-core 0.19 and later keep the common state among the tensors' objects."""
    folder = shutil.copytree(checkpoint, tmp_path / "copy")
    (folder / "iter_0000000" / "common.pt").unlink()
    (folder / "iter_0000000" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    back = megatron_to_hf(folder, source, tmp_path / "back")
    assert_same_tensors(tensors_of(back), tensors_of(source))


@pytest.mark.parametrize("converted_first", [True, False])
def test_dtype_is_converted_in_both_directions(converted_first, source, checkpoint, tmp_path):
    expected = {name: tensor.bfloat16() for name, tensor in tensors_of(source).items()}
    if converted_first:
        megatron = hf_to_megatron(source, tmp_path / "megatron", dtype=torch.bfloat16)
        back = megatron_to_hf(megatron, source, tmp_path / "back")
    else:
        back = megatron_to_hf(checkpoint, source, tmp_path / "back", dtype=torch.bfloat16)
    assert_same_tensors(tensors_of(back), expected)


def test_the_config_names_the_dtype_of_the_result(source, checkpoint, tmp_path):
    model = shutil.copytree(source, tmp_path / "model")
    rewrite(model, dtype="float32", torch_dtype="float16", quantization_config={"quant_method": "fp8"})
    back = megatron_to_hf(checkpoint, model, tmp_path / "back", dtype=torch.bfloat16)
    config = json.loads((back / "config.json").read_text())
    assert (config["dtype"], config["torch_dtype"]) == ("bfloat16", "bfloat16")
    assert "quantization_config" not in config
    assert not (back / "model.safetensors.index.json").exists()  # one file needs no index


def test_numbers_beyond_fp16s_range_are_refused(source, tmp_path):
    large = shutil.copytree(source, tmp_path / "large")
    rewrite(large, lambda tensors: tensors["model.norm.weight"].fill_(1e6))
    with pytest.raises(UserError, match=r"model\.norm\.weight has values beyond fp16's range"):
        hf_to_megatron(large, tmp_path / "fp16", dtype=torch.float16)
    assert not (tmp_path / "fp16").exists()


def test_verify_finds_one_changed_bit(tmp_path):
    source = save_model("qwen3", tmp_path / "source")
    megatron = hf_to_megatron(source, tmp_path / "megatron")
    name = "model.layers.2.self_attn.k_proj.weight"
    rewrite(source, lambda tensors: tensors[name].view(torch.int32)[3, 4].bitwise_xor_(1))
    different = set(verify(source, megatron).different)
    assert different == {f"model.layers.2.self_attn.{x}_proj.weight" for x in "qkv"}  # one fused tensor


def test_verify_compares_logits_through_megatron_core(source, checkpoint, tmp_path):
    """Run where verify runs: the second model has its key and value matrices exchanged."""
    assert compare_logits(source, checkpoint) < LOGITS_TOLERANCE < 1e-3
    other = shutil.copytree(source, tmp_path / "other")
    key, value = (f"model.layers.0.self_attn.{x}_proj.weight" for x in "kv")
    rewrite(other, lambda tensors: tensors.update({key: tensors[value], value: tensors[key]}))
    assert compare_logits(other, checkpoint) > 1e-2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": 8, "num_key_value_heads": 4}, "num_attention_heads=4, config.json gives 8"),
        ({"num_hidden_layers": 3}, r"num_layers=4, config.json gives 3 \(num_hidden_layers\)"),
        ({"vocab_size": 97}, "vocab_size=96, config.json gives 97"),
        ({"rms_norm_eps": 0.1}, "layernorm_epsilon=1e-06, config.json gives 0.1"),
        ({"hidden_act": "gelu"}, "activation_func=torch.nn.functional.silu, config.json gives .*gelu"),
        ({"hidden_act": "relu2"}, "hidden_act='relu2' of config.json is not one of silu"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, "rotary_base=.*json gives 7.0"),
        ({"rope_parameters": LLAMA3_ROPE | {"rope_theta": 1e4}}, "rope_scaling=False, .*json gives True"),
        ({"intermediate_size": 60}, r"linear_fc1.weight is \[4, 128, 32\], config.json says \[4, 120, 32\]"),
        ({"tie_word_embeddings": True}, "the output layer differs from the embedding"),
    ],
)
def test_config_of_another_model_is_refused_before_anything_is_written(
    change, message, source, checkpoint, tmp_path
):
    other = shutil.copytree(source, tmp_path / "other")
    rewrite(other, **change)
    with pytest.raises(UserError, match=message):
        megatron_to_hf(checkpoint, other, tmp_path / "out")
    assert names_in(tmp_path) == ["other"]


def test_side_files_for_bridge(megatron_checkpoints):
    folder = megatron_checkpoints("llama3-rope")
    inner = folder / "iter_0000000"
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "0"
    state = torch.load(folder / "latest_train_state.pt", weights_only=True)
    assert state["step"] == 0
    model = yaml.safe_load((inner / "run_config.yaml").read_text())["model"]
    assert model["layernorm_epsilon"] == 1e-6  # a number, not the text '1e-06'
    rope = [model[key] for key in ("rope_scaling", "rope_scaling_factor", "rotary_base")]
    assert rope == [True, 8.0, 500000.0]
    assert (model["num_query_groups"], model["kv_channels"], model["qk_layernorm"]) == (2, 8, False)
    assert set(names_in(inner)) >= {".metadata", "common.pt", "metadata.json", "train_state.pt"}
