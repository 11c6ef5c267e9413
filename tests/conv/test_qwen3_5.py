"""What only Qwen3.5's checkpoints have: delta nets stored in parts, gates among the queries."""

import re
import shlex
import shutil
import subprocess
import sys

import pytest
import torch
import transformers
from conv_models import rewrite, save_adapters, shapes_in, tensors_of
from conv_ranks import delta_net_after_a_change, on_ranks
from small_models import small_config

from checkpoints_conv.hf_to_megatron import hf_to_megatron
from checkpoints_conv.lora import merge_lora
from checkpoints_conv.megatron_to_hf import megatron_to_hf
from checkpoints_conv.verify import verify
from nemo_grpo import UserError

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
