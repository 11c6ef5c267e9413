"""What only DeepSeek-V3's checkpoints have: FP8 blocks, heads behind the last layer, a bias in the router."""

import shutil

import pytest
import torch
from conv_models import assert_same_tensors, rewrite, save_model, shapes_in, tensors_of
from transformers import AutoConfig

from checkpoints_conv.formats.safetensors_io import SafetensorsFolder
from checkpoints_conv.hf_to_megatron import hf_to_megatron
from checkpoints_conv.inspect import summarize
from checkpoints_conv.megatron_to_hf import megatron_to_hf
from checkpoints_conv.verify import verify
from nemo_grpo import UserError
from nemo_grpo.engine.megatron.logits import compare_logits
from nemo_grpo.sampling.decoder.weights import unsupported
from nemo_grpo.support.model_folder import hf_config

BIAS = "mlp.gate.e_score_correction_bias"


@pytest.fixture
def model(hf_models, tmp_path):
    return shutil.copytree(hf_models("deepseek-v3"), tmp_path / "model")


def test_layers_are_stored_one_by_one_and_experts_stacked(megatron_checkpoints):
    """Layer 0 is dense; megatron-core stacks only layers that are alike."""
    shapes = shapes_in(megatron_checkpoints("deepseek-v3"))
    assert shapes["decoder.layers.0.mlp.linear_fc1.weight"] == (128, 32)
    assert shapes["decoder.layers.1.mlp.experts.experts.linear_fc1.weight"] == (4, 32, 32)
    assert shapes["decoder.layers.3.mlp.shared_experts.linear_fc2.weight"] == (32, 32)
    assert not any(name.startswith("decoder.layers.0.mlp.experts") for name in shapes)
    attention = "decoder.layers.1.self_attention."  # norms have the names of Transformer Engine's layers
    assert shapes[f"{attention}linear_q_up_proj.layer_norm_weight"] == (24,)
    assert shapes[f"{attention}linear_kv_up_proj.layer_norm_weight"] == (20,)


@pytest.mark.parametrize("direction", ["hf-to-megatron", "megatron-to-hf"])
def test_the_routers_bias_is_not_rounded(direction, model, tmp_path):
    """Megatron trains it in steps of 1e-3 around numbers up to 10, and keeps it in float32."""
    dtypes = {"hf-to-megatron": torch.bfloat16, "megatron-to-hf": None}
    megatron = hf_to_megatron(model, tmp_path / "megatron", dtype=dtypes[direction])
    back = tensors_of(megatron_to_hf(megatron, model, tmp_path / "hf", dtype=torch.bfloat16))
    name = f"model.layers.2.{BIAS}"
    assert_same_tensors({name: back[name]}, {name: tensors_of(model)[name]})
    assert {tensor.dtype for name, tensor in back.items() if BIAS not in name} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("family", "head", "key"),
    [
        ("deepseek-v3", "model.layers.4.enorm.weight", "num_nextn_predict_layers"),
        ("qwen3.5", "mtp.norm.weight", "mtp_num_hidden_layers"),
    ],
)
def test_heads_for_multi_token_prediction_are_left_out_and_it_is_said(
    family, head, key, hf_models, tmp_path, caplog
):
    model = shutil.copytree(hf_models(family), tmp_path / "model")
    rewrite(model, lambda tensors: tensors.update({head: torch.zeros(32)}), **{key: 1})
    megatron = hf_to_megatron(model, tmp_path / "megatron")
    assert f"1 tensors for multi-token prediction ({head}, ...) are left out" in caplog.messages
    back = megatron_to_hf(megatron, model, tmp_path / "back")
    assert hf_config(back)[key] == 0
    assert_same_tensors(tensors_of(back), tensors_of(hf_models(family)))
    assert not verify(back, megatron).different
    rewrite(model, lambda tensors: tensors.update({"model.layers.5.x": torch.zeros(1)}))  # behind the head
    with pytest.raises(UserError, match=r"not known: model\.layers\.5\.x"):
        hf_to_megatron(model, tmp_path / "other")


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("moonlight", "DeepseekV3ForCausalLM is not supported; supported: Llama"),
        ("qwen3.5-moe", "neither the embedded engine nor the decoder computes its gated"),
    ],
)
def test_the_engine_and_the_decoder_name_what_they_do_not_compute(
    family, message, hf_models, megatron_checkpoints
):
    assert message in unsupported(AutoConfig.from_pretrained(hf_models(family)))
    with pytest.raises(UserError, match=message):
        compare_logits(hf_models(family), megatron_checkpoints(family))


def in_blocks(weight, block=(128, 128)):
    """FP8 codes and scales of a matrix, a block at a time, and what they stand for."""
    rows, columns = (-(-size // width) for size, width in zip(weight.shape, block, strict=True))
    codes, scales = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    decoded = torch.empty(weight.shape)
    height, width = block
    for i in range(rows):
        for j in range(columns):
            at = slice(height * i, height * (i + 1)), slice(width * j, width * (j + 1))
            scales[i, j] = weight[at].abs().max() / 448
            codes[at] = (weight[at] / scales[i, j]).to(codes.dtype)
            decoded[at] = codes[at].float() * scales[i, j]
    return codes, scales, decoded.bfloat16()


@pytest.mark.parametrize("block", [(96, 96), (64, 96)])
def test_the_block_size_of_config_json_is_read(block, tmp_path, monkeypatch):
    """192 x 192 has 2 x 2 blocks of 96 and of 128, so the grid does not tell them apart."""
    name = "model.layers.1.self_attn.q_proj.weight"
    sizes = {"hidden_size": 192, "head_dim": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
    model = save_model("qwen3", tmp_path / "model", torch.bfloat16, **sizes)
    codes, scales, decoded = in_blocks(tensors_of(model)[name].float(), block)
    expected = tensors_of(model) | {name: decoded}
    quantized = {name: codes, f"{name}_scale_inv": scales}
    said = {"weight_block_size": [*block]}
    rewrite(model, lambda tensors: tensors.update(quantized), quantization_config=said)
    piece = 50 * 192 * 2  # so that pieces begin within blocks
    monkeypatch.setattr("checkpoints_conv.hf_to_megatron.PIECE_BYTES", piece)
    megatron = hf_to_megatron(model, tmp_path / "megatron")
    assert_same_tensors(tensors_of(megatron_to_hf(megatron, model, tmp_path / "back")), expected)
    assert not verify(model, megatron).different


@pytest.mark.parametrize("stated", [[96], [0, 96], "96", [96, 96.0], 96])
def test_a_block_size_that_is_none_is_refused(stated, source, tmp_path):
    model = shutil.copytree(source, tmp_path / "model")
    rewrite(model, quantization_config={"weight_block_size": stated})
    with pytest.raises(UserError, match=r"weight_block_size=.* is not a block's rows and columns"):
        hf_to_megatron(model, tmp_path / "megatron")


@pytest.fixture
def quantized(tmp_path):
    """A model with its matrices in FP8, some of several blocks; and the numbers that they stand for."""
    folder = save_model(
        "deepseek-v3", tmp_path / "fp8", torch.bfloat16,
        hidden_size=160, intermediate_size=300, num_hidden_layers=2,
    )  # fmt: skip
    expected = tensors_of(folder)

    def quantize(tensors):
        for name in [name for name in tensors if "_proj" in name]:
            codes, scales, decoded = in_blocks(tensors[name].float())
            tensors |= {name: codes, f"{name}_scale_inv": scales}
            expected[name] = decoded

    rewrite(folder, quantize, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    return folder, expected


def test_fp8_blocks_are_read_as_bf16(quantized, tmp_path, monkeypatch):
    folder, expected = quantized
    for converter in ("hf_to_megatron", "megatron_to_hf"):
        monkeypatch.setattr(f"checkpoints_conv.{converter}.PIECE_BYTES", 5000)  # within a block, too
    megatron = hf_to_megatron(folder, tmp_path / "megatron")
    back = megatron_to_hf(megatron, folder, tmp_path / "back")
    assert_same_tensors(tensors_of(back), expected)
    assert "quantization_config" not in hf_config(back)
    assert not verify(folder, megatron).different
    weights = SafetensorsFolder(folder)
    name = "model.layers.0.mlp.gate_proj.weight"
    assert torch.equal(weights.read(name), expected[name])
    weights.close()
    stored = {name: dtype.safetensors for name, _, dtype, _ in summarize(folder).tensors}  # as it is
    assert (stored[name], stored[f"{name}_scale_inv"]) == ("F8_E4M3", "F32")


def test_fp8_with_scales_of_other_blocks_is_refused(quantized, tmp_path):
    folder, _ = quantized
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    rewrite(folder, lambda tensors: tensors.update({name: torch.ones(1, 1)}))
    with pytest.raises(UserError, match=r"up_proj.weight_scale_inv is .* not a number for each block of 128"):
        hf_to_megatron(folder, tmp_path / "megatron")


def test_layers_that_differ_are_found_in_the_run_config(model, megatron_checkpoints, tmp_path):
    """Shapes alone do not tell how the routed experts' share is scaled."""
    rewrite(model, routed_scaling_factor=1.0)
    with pytest.raises(UserError, match=r"moe_router_topk_scaling_factor=2\.5, config.json gives 1\.0"):
        megatron_to_hf(megatron_checkpoints("deepseek-v3"), model, tmp_path / "out")
