"""Against the real megatron-core: what it loads from us, and what we read from it."""

import pytest
import torch
from conv_models import assert_same_tensors, tensors_of
from conv_ranks import TOKENS, logits_from_checkpoint, on_ranks, parameters_from_checkpoint, save_after_a_step
from transformers import AutoModelForCausalLM

from checkpoints_conv.formats.torch_dist import TorchDistReader
from checkpoints_conv.hf_to_megatron import hf_to_megatron
from checkpoints_conv.megatron_to_hf import megatron_to_hf
from nemo_grpo.models import family_for
from nemo_grpo.support.model_folder import hf_config

# Two families at every layout; the others, which add rope scaling, biases and tying, at the hardest one.
CASES = [
    *((family, *layout) for family in ("qwen2-tied", "qwen3") for layout in ((1, 1), (2, 1), (2, 2))),
    *((family, 2, 2) for family in ("qwen2", "llama3-rope", "mistral")),
    *(("qwen3-moe", tensor, 1) for tensor in (1, 2)),
]


@pytest.mark.parametrize(("family", "tensor", "pipeline"), CASES)
def test_megatron_core_loads_our_checkpoint_and_computes_transformers_logits(
    family, tensor, pipeline, hf_models, megatron_checkpoints, tmp_path
):
    folder, checkpoint = hf_models(family), megatron_checkpoints(family) / "iter_0000000"
    found = on_ranks(tensor * pipeline, logits_from_checkpoint, folder, checkpoint, tensor, pipeline)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = model(TOKENS).logits
    assert expected.std() > 0.1  # the comparison means something
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "tensor", "pipeline", "expert"),
    [
        *[("qwen2-tied", 2, 2, 1), ("qwen3-moe", 1, 1, 2)],
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("qwen2", 2, 2, 1), ("qwen3", 1, 2, 1))),
    ],
)
def test_checkpoint_saved_by_megatron_core_with_optimizer_is_exported(
    family, tensor, pipeline, expert, hf_models, tmp_path
):
    """The oracle is megatron-core's own loader, which reads the same checkpoint at TP 1."""
    folder, checkpoint = hf_models(family), tmp_path / "policy" / "weights" / "iter_0000007"
    checkpoint.mkdir(parents=True)
    num_ranks = tensor * pipeline * expert
    on_ranks(num_ranks, save_after_a_step, folder, checkpoint, tensor, pipeline, None, expert)
    reader = TorchDistReader(tmp_path)
    assert any(name.startswith("optimizer") for name in reader.keys)
    assert not any("optimizer" in name for name in reader.weights)
    reader.close()
    oracle = on_ranks(1, parameters_from_checkpoint, folder, checkpoint)
    expected = dict(family_for(hf_config(folder)).to_hf(oracle))
    found = tensors_of(megatron_to_hf(tmp_path, folder, tmp_path.with_name(tmp_path.name + "-hf")))
    assert_same_tensors(found, {name: tensor.contiguous() for name, tensor in expected.items()})
    assert not torch.equal(found["model.norm.weight"], tensors_of(folder)["model.norm.weight"])


def test_vocabulary_padded_by_megatron_is_cut(source, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    on_ranks(2, save_after_a_step, source, checkpoint, 2, 1, 128)
    oracle = on_ranks(1, parameters_from_checkpoint, source, checkpoint, 128)
    assert oracle["output_layer.weight"].shape == (128, 32)
    found = tensors_of(megatron_to_hf(checkpoint, source, tmp_path / "hf"))
    assert torch.equal(found["lm_head.weight"], oracle["output_layer.weight"][:96])
    assert torch.equal(found["model.embed_tokens.weight"], oracle["embedding.word_embeddings.weight"][:96])


def test_padded_vocabulary_is_written_and_loaded(source, tmp_path):
    padded = hf_to_megatron(source, tmp_path / "megatron", padded_vocab_size=128)
    found = on_ranks(1, parameters_from_checkpoint, source, padded / "iter_0000000", 128)
    embedding = found["embedding.word_embeddings.weight"]
    assert torch.equal(embedding[:96], tensors_of(source)["model.embed_tokens.weight"])
    assert (embedding[96:] == 0).all()
    back = megatron_to_hf(padded, source, tmp_path / "hf")
    assert_same_tensors(tensors_of(back), tensors_of(source))
