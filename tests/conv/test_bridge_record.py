"""Tables and settings are Megatron-Bridge's as recorded, and keys and shapes Transformer Engine's."""

import json
import re
from pathlib import Path

import pytest
import torch
from conv_models import CONFIGS
from small_models import auto_class
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from checkpoints_conv.formats.dtypes import DTYPES
from checkpoints_conv.hf_to_megatron import hf_to_megatron
from checkpoints_conv.run_config import model_section
from nemo_grpo.models import family_for
from nemo_grpo.models.shared_mappings import whole_name

RECORDED = json.loads((Path(__file__).parents[1] / "contract/megatron_bridge-0.6.2.json").read_text())
OURS = {
    "_target_": "the class, which the record leaves out",
    "make_vocab_size_divisible_by": "rows are padded as the layout needs, not as the model was published",
    "bf16": "the checkpoint's dtype; Bridge builds gpt-oss in bf16",
}
OF_FAMILY = {
    "deepseek-v3": {"kv_channels", "rope_scaling_factor"},  # without effect under latent attention
    "moonlight": {"kv_channels"},
    "gpt-oss": {"rope_scaling_factor"},  # of another kind of scaling
    "qwen2.5-vl": {"mrope_section"},  # Bridge reads the older form of config.json alone
}


@pytest.fixture(params=RECORDED)
def name(request):
    return request.param


@pytest.fixture
def family(name):
    config = CONFIGS[name]()
    config.architectures = [auto_class(config)._model_mapping[type(config)].__name__]
    return family_for(config.to_dict())


PART = re.compile(r"\.weight\.(query|key|value|z|beta|alpha)$")


def whole_tensors(entries):
    """Megatron's names of an entry -> Hugging Face's; parts that a checkpoint stores separately are one."""
    found = {}
    for entry in entries:
        names = [PART.sub(".weight", name) for name in (entry.fused, entry.megatron, entry.twin) if name]
        hf = found.setdefault(tuple(name.format(layer="*", expert="*") for name in names), [])
        for name, _ in entry.hf:
            whole = whole_name(name.format(layer="*", expert="*"))
            hf += [whole] if whole not in hf else []
    return found


def one_by_one(tensors: dict[str, list[str]]) -> dict[str, list[str]]:
    """With experts as modules of their own, which Bridge lists for some families only."""
    grouped = re.compile(r"experts\.(linear_fc[12])\.(weight|bias)\*$")
    return tensors | {grouped.sub(r"experts.local_experts.*.\1.\2", name): hf for name, hf in tensors.items()}


def test_every_tensor_is_made_of_what_bridge_makes_it_of(name, family):
    theirs = one_by_one(RECORDED[name]["tensors"])
    for names, hf in whole_tensors(family.entries).items():
        if names[0].startswith("visual."):
            assert theirs["visual.**"] == ["visual.**"]
            assert hf == list(names)
            continue
        known = theirs.keys() & names
        assert known, f"Bridge has no {names}"
        assert {each: theirs[each] for each in known} == dict.fromkeys(known, hf)


def test_settings_of_the_model_are_bridges(name, family):
    theirs, ours = RECORDED[name]["provider"], model_section(family, DTYPES["float32"])
    allowed = OURS.keys() | OF_FAMILY.get(name.removesuffix("-tied"), set())
    compared = [key for key in ours if key in theirs and key not in allowed]
    assert {key: ours[key] for key in compared} == {key: theirs[key] for key in compared}
    assert len(compared) >= 24
    plain = (bool, int, float, str)
    said = {key for key, value in ours.items() if isinstance(value, plain) and key not in theirs}
    assert said - allowed <= {"kv_channels"}, "Bridge computes it, if config.json does not say it"


_FILE = json.loads((Path(__file__).parents[1] / "contract/transformer_engine-2.20.2.json").read_text())
SIZES, LAYERS = _FILE["sizes"], _FILE["checkpoints"]
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
LAYER_CONFIGS = {
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=False),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **MOE, tie_word_embeddings=False),
}


@pytest.mark.parametrize("family", LAYER_CONFIGS)
def test_a_converted_checkpoint_has_every_key_of_transformer_engines_layers(family, tmp_path):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LAYER_CONFIGS[family]).float().save_pretrained(tmp_path / "hf")
    folder = hf_to_megatron(tmp_path / "hf", tmp_path / "megatron") / "iter_0000000"
    stored = FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    found = {name: list(one.size) if hasattr(one, "size") else None for name, one in stored.items()}
    assert {name: found.get(name, "missing") for name in LAYERS[family]} == LAYERS[family]
