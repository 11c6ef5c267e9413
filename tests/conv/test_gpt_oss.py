"""What only gpt-oss' checkpoints have: 4-bit numbers, a layer's experts in one tensor, [in, out] matrices."""

import pytest
import torch
from conv_models import rewrite, save_model
from transformers import AutoModelForCausalLM, Mxfp4Config

from checkpoints_conv.formats.dtypes import decode_mxfp4 as decode
from checkpoints_conv.hf_to_megatron import hf_to_megatron
from checkpoints_conv.megatron_to_hf import megatron_to_hf
from checkpoints_conv.verify import verify
from nemo_grpo import UserError
from nemo_grpo.models.ops import GATE_UP_IN_TURNS, TRANSPOSED
from nemo_grpo.support.model_folder import hf_config

WIDE = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2}


def test_gate_and_up_take_turns_along_the_columns():
    part = torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8]])  # [h, 2 f]: gate 1 3, up 2 4 of the first input
    whole = GATE_UP_IN_TURNS.join([part], {})
    assert whole.tolist() == [[1, 5], [3, 7], [2, 6], [4, 8]]
    assert torch.equal(GATE_UP_IN_TURNS.split(whole, [2], {})[0], part)
    assert GATE_UP_IN_TURNS.join([torch.tensor([1.0, 2, 3, 4])], {}).tolist() == [1, 3, 2, 4]
    assert TRANSPOSED.join([part], {}).tolist() == [[1, 5], [2, 6], [3, 7], [4, 8]]


def test_four_bits_are_sign_and_magnitude():
    blocks = torch.zeros(1, 1, 16, dtype=torch.uint8)
    blocks[0, 0, 0] = 0x01  # 0.5
    blocks[0, 0, 1] = 0x07  # 6.0
    blocks[0, 0, 2] = 0x0A  # -1.0
    blocks[0, 0, 3] = 0x09  # -0.5
    decoded = decode(blocks, torch.tensor([[128]], dtype=torch.uint8))  # times 2
    assert decoded.shape == (32, 1)
    assert decoded[:8:2, 0].tolist() == [1.0, 12.0, -2.0, -1.0]


def test_the_lower_half_of_a_byte_comes_first():
    blocks = torch.zeros(1, 1, 16, dtype=torch.uint8)
    blocks[0, 0, 0] = 0x71  # 0.5 in the lower half, 6.0 in the upper
    blocks[0, 0, 1] = 0x9A  # -1.0 in the lower half, -0.5 in the upper
    decoded = decode(blocks, torch.tensor([[128]], dtype=torch.uint8))  # times 2
    assert decoded[:5, 0].tolist() == [1.0, 12.0, -2.0, -1.0, 0.0]


@pytest.fixture
def packed(tmp_path):
    """A model whose experts are 4-bit numbers."""
    folder = save_model("gpt-oss", tmp_path / "packed", torch.bfloat16, **WIDE)

    def pack(tensors):
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            experts, into, out = tensors.pop(name).shape
            tensors[f"{name}_blocks"] = torch.randint(256, (experts, out, into // 32, 16), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(118, 124, (experts, out, into // 32), dtype=torch.uint8)

    rewrite(folder, pack, quantization_config={"quant_method": "mxfp4"})
    return folder


def test_a_packed_model_is_exported_as_transformers_decodes_it(packed, tmp_path):
    megatron = hf_to_megatron(packed, tmp_path / "megatron")
    assert not verify(packed, megatron).different
    exported = megatron_to_hf(megatron, packed, tmp_path / "exported")
    assert "quantization_config" not in hf_config(exported)
    ids, logits = torch.arange(3, 15)[None], []
    for folder, further in ((packed, {"quantization_config": Mxfp4Config(dequantize=True)}), (exported, {})):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **further).eval()
        with torch.no_grad():
            logits.append(model(ids).logits)
    assert logits[0].std() > 0.1
    assert torch.equal(*logits)


def test_scales_of_other_blocks_are_refused(packed, tmp_path):
    name = "model.layers.0.mlp.experts.down_proj_scales"
    rewrite(packed, lambda tensors: tensors.update({name: torch.ones(1, 1, 1, dtype=torch.uint8)}))
    with pytest.raises(UserError, match=r"down_proj_blocks is .* its scales .* no MXFP4; dequantise"):
        hf_to_megatron(packed, tmp_path / "megatron")


def test_experts_of_another_number_are_refused(tmp_path):
    folder = save_model("gpt-oss", tmp_path / "model", **WIDE)
    rewrite(folder, num_local_experts=3)
    with pytest.raises(UserError, match=r"gate_up_proj is \[4, 64, 64\], config.json says \[3, 64, 64\]"):
        hf_to_megatron(folder, tmp_path / "megatron")
