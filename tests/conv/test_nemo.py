"""Checkpoints of nemo-toolkit, which is not installed: megatron-core writes them, as NeMo lets it.

model.yaml has the keys and the form of NeMo 2.4's `io_dump`.
"""

import shutil

import pytest
import torch
import yaml
from conv_models import assert_same_tensors, tensors_of
from conv_ranks import on_ranks, parameters_from_checkpoint, save_after_a_step

from checkpoints_conv.formats.torch_dist import TorchDistReader
from checkpoints_conv.hf_to_megatron import hf_to_megatron
from checkpoints_conv.megatron_to_hf import megatron_to_hf
from checkpoints_conv.verify import verify
from nemo_grpo import UserError
from nemo_grpo.models import family_for
from nemo_grpo.support.model_folder import hf_config

MODEL = {
    "_target_": "nemo.collections.llm.gpt.model.qwen2.Qwen2Config",
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": None,
    "vocab_size": 128,
    "layernorm_epsilon": 1e-6,
    "activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False},
    "add_qkv_bias": True,
    "rotary_base": 10000.0,
    "moe_router_topk": 2,
}


@pytest.fixture(scope="module")
def folders(hf_models, tmp_path_factory):
    """(NeMo 2.0 folder, the same weights without NeMo's prefix)."""
    found = []
    for name, prefix in (("nemo", "module."), ("plain", "")):
        folder = tmp_path_factory.mktemp(name)
        (folder / "weights").mkdir()
        on_ranks(2, save_after_a_step, hf_models("qwen2"), folder / "weights", 2, 1, 128, 1, prefix)
        found.append(folder)
    (found[0] / "context").mkdir()
    model = {"_target_": "nemo.collections.llm.gpt.model.qwen2.Qwen2Model", "config": MODEL}
    (found[0] / "context" / "model.yaml").write_text(yaml.safe_dump(model))
    return found


def test_a_nemo_folder_becomes_a_hugging_face_model(folders, source, tmp_path):
    """megatron-core, which loads the same weights without the prefix, is the oracle."""
    nemo, plain = folders
    reader = TorchDistReader(nemo)
    assert "decoder.final_layernorm.weight" in reader.weights
    assert reader.has_optimizer
    reader.close()
    oracle = on_ranks(1, parameters_from_checkpoint, source, plain / "weights", 128)
    expected = {name: t.contiguous() for name, t in family_for(hf_config(source)).to_hf(oracle)}
    for given in (nemo, nemo / "weights"):
        model = megatron_to_hf(given, source, tmp_path / "hf", force=True)
        assert_same_tensors(tensors_of(model), expected)
    assert not verify(model, nemo).different
    assert not torch.equal(expected["model.norm.weight"], tensors_of(source)["model.norm.weight"])


def test_model_yaml_of_another_model_is_refused(folders, source, tmp_path):
    nemo = shutil.copytree(folders[0], tmp_path / "nemo")
    model = {"config": MODEL | {"rotary_base": 1000000.0}}
    (nemo / "context" / "model.yaml").write_text(yaml.safe_dump(model))
    with pytest.raises(UserError, match=r"model\.yaml has rotary_base=1000000\.0, config\.json gives 10000"):
        megatron_to_hf(nemo, source, tmp_path / "hf")


def test_a_nemo_folder_as_a_hugging_face_model_is_refused_with_the_command(folders, tmp_path):
    command = r"is a NeMo 2\.0 checkpoint; .* convert megatron-to-hf --megatron-checkpoint"
    with pytest.raises(UserError, match=command):
        hf_to_megatron(folders[0], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("given", "file", "message"),
    [
        ("model.nemo", "model.nemo", r"NeMo 1 checkpoint; NeMo's scripts/.*nemo1_to_nemo2\.py"),
        (".", "model_config.yaml", r"NeMo 1 checkpoint; NeMo's scripts/.*nemo1_to_nemo2\.py"),
        (".", "weights/metadata.json", "weights is in the zarr format; save it again as torch_dist"),
    ],
)
def test_older_formats_are_refused_with_the_remedy(given, file, message, source, tmp_path):
    (tmp_path / "weights").mkdir()
    (tmp_path / file).write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(UserError, match=message):
        megatron_to_hf(tmp_path / given, source, tmp_path / "hf")
