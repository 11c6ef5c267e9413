"""The decoder against transformers: every family, rope scaling, ragged prompts, and which models it takes."""

import logging
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from toy_models import logprobs_of, make_generator, make_model, responses

from nemo_grpo.sampling.decoder import cache, prompts, weights
from nemo_grpo.sampling.generate_decoder import DecoderGenerator
from nemo_grpo.sampling.generate_hf import HFGenerator
from nemo_grpo.sampling.generators import build_local, choose
from nemo_grpo.sampling.requests import Request, SamplingParams
from nemo_grpo.support import machine
from nemo_grpo.support.errors import UserError

VOCAB = 48
PROMPTS = [[3, 7, 1], [5], [9, 9, 2, 30, 11, 4, 8], [12, 1], [44, 2, 40]]
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 36, "intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 12,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
ORIGINAL = {"rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0} | ORIGINAL
FAMILIES = {
    "qwen2": lambda **options: transformers.Qwen2Config(**SIZES | options),
    "qwen3": lambda **options: transformers.Qwen3Config(**SIZES | options),
    "llama": lambda **options: transformers.LlamaConfig(**SIZES | options),
    "mistral": lambda **options: transformers.MistralConfig(**SIZES | {"sliding_window": None} | options),
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "no-groups": ("llama", {"num_key_value_heads": 6}),
    "one-group": ("qwen3", {"num_key_value_heads": 1}),
    "llama3-rope": ("llama", {"rope_parameters": LLAMA3}),
    "linear-rope": ("llama", {"rope_parameters": {"rope_type": "linear"} | ORIGINAL}),
    "yarn-rope": ("qwen2", {"rope_parameters": {"rope_type": "yarn"} | ORIGINAL}),
    "wide-window": ("mistral", {"sliding_window": 128}),
    "window-unused": ("qwen2", {"use_sliding_window": False, "sliding_window": 64}),
}


WINDOW = {"use_sliding_window": True, "sliding_window": 64}


def decoder_of(model: Any, **options: Any) -> DecoderGenerator:
    return make_generator(DecoderGenerator, model, **options)


@pytest.fixture(scope="module", params=VARIANTS)
def model(request):
    family, options = VARIANTS[request.param]
    return make_model(FAMILIES[family](**options))


@pytest.mark.parametrize("options", [{}, {"temperature": 1.4, "top_k": 9}, {"top_p": 0.7}])
def test_the_same_responses_as_the_transformers_generator(model, options):
    sampling = SamplingParams(24, stop_token_ids=(4, 5), **options)
    theirs = make_generator(HFGenerator, model)
    want, got = (g.generate(Request(PROMPTS, 3, sampling, 2)) for g in (theirs, decoder_of(model)))
    assert torch.equal(got.tokens, want.tokens)
    assert torch.equal(got.lengths, want.lengths)
    assert torch.equal(got.truncated, want.truncated)
    torch.testing.assert_close(got.logprobs, want.logprobs, atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def qwen3():
    return make_model(FAMILIES["qwen3"](tie_word_embeddings=True))


@pytest.fixture
def packing(monkeypatch):
    """Every weight is packed, whatever the processor."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(weights, "packs", lambda _weight: True)


def test_packed_weights_compute_the_same(model, packing, monkeypatch):
    packed = decoder_of(model)
    monkeypatch.undo()
    plain = decoder_of(model)
    torch.testing.assert_close(packed.logits(PROMPTS), plain.logits(PROMPTS), atol=1e-5, rtol=1e-5)
    got, want = (g.generate(Request(PROMPTS, 3, SamplingParams(12), 2)) for g in (packed, plain))
    assert torch.equal(got.tokens, want.tokens)
    torch.testing.assert_close(got.logprobs, want.logprobs, atol=1e-5, rtol=0)


def test_packed_weights_follow_an_update_and_are_held_once(qwen3, packing):
    other = make_model(qwen3.config, seed=1)
    generator, expected = decoder_of(qwen3), decoder_of(other)
    generator.update_weights(other.named_parameters())
    assert torch.equal(generator.logits(PROMPTS), expected.logits(PROMPTS))
    weights = generator.decoder.weights
    assert weights.layers[0].qkv.weight.untyped_storage().nbytes() == 0
    assert torch.equal(weights.embedding, other.get_input_embeddings().weight)  # tied: looked up, too


@pytest.mark.parametrize(
    ("processor_words", "dtype", "size", "expected"),
    [
        ({"AuthenticAMD"}, torch.float32, 2**18, True),
        ({"AuthenticAMD"}, torch.float32, 2**18 - 1, False),
        ({"GenuineIntel", "avx512_bf16"}, torch.float32, 2**18, False),
        ({"GenuineIntel", "avx512_bf16", "amx_bf16"}, torch.float32, 2**18, True),
        ({"GenuineIntel", "avx512_bf16", "amx_bf16"}, torch.bfloat16, 2**18, True),
        ({"AuthenticAMD"}, torch.bfloat16, 2**18, False),
        ({"AuthenticAMD", "avx512_bf16"}, torch.bfloat16, 2**18, True),
        ({"AuthenticAMD"}, torch.float64, 2**18, False),
    ],
)
def test_the_processor_decides_on_packing(processor_words, dtype, size, expected, monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(machine, "_words", lambda: frozenset(processor_words))
    assert weights.packs(torch.empty(size, dtype=dtype)) is expected


def test_the_cache_grows_and_keeps_what_it_holds(qwen3, monkeypatch):
    sampling = SamplingParams(40, stop_token_ids=(0, 1))
    at_once = decoder_of(qwen3).generate(Request(PROMPTS, 4, sampling, 1))
    grown, grow = [], cache.KVCache._grow
    monkeypatch.setattr(cache, "MIN_ROOM", 2)
    monkeypatch.setattr(cache.KVCache, "_grow", lambda self: (grow(self), grown.append(self._width))[0])
    in_steps = decoder_of(qwen3).generate(Request(PROMPTS, 4, sampling, 1))
    assert len(grown) > 3
    assert grown[-1] == 7 + 40
    assert torch.equal(in_steps.tokens, at_once.tokens)
    torch.testing.assert_close(in_steps.logprobs, at_once.logprobs, atol=1e-5, rtol=0)


def test_prompts_are_read_in_passes_of_bounded_size(qwen3, monkeypatch):
    at_once = decoder_of(qwen3).generate(Request(PROMPTS, 2, SamplingParams(6), 1))
    monkeypatch.setattr(prompts, "MAX_TOKENS", 6)
    streams = list(prompts.prompt_streams(PROMPTS, torch.arange(5), torch.device("cpu")))
    assert [stream.prompts.tolist() for stream in streams] == [[1, 3, 0], [4], [2]]
    in_passes = decoder_of(qwen3).generate(Request(PROMPTS, 2, SamplingParams(6), 1))
    assert torch.equal(in_passes.tokens, at_once.tokens)
    torch.testing.assert_close(in_passes.logprobs, at_once.logprobs, atol=1e-5, rtol=0)


def test_prompts_are_read_once_and_finished_rows_leave(qwen3, monkeypatch):
    generator, num_tokens = decoder_of(qwen3), []
    forward = generator.decoder._hidden_states
    monkeypatch.setattr(
        generator.decoder, "_hidden_states", lambda *a: (num_tokens.append(len(a[0])), forward(*a))[1]
    )
    sampling = SamplingParams(9, stop_token_ids=tuple(range(10)))
    rollout = generator.generate(Request(PROMPTS, 8, sampling, 0))
    going = [int((rollout.lengths > step).sum()) for step in range(1, 9)]
    assert num_tokens == [sum(map(len, PROMPTS)), *[count for count in going if count]]
    assert going[0] < 40


def test_what_is_sampled_can_be_trained_on(qwen3):
    """Tensors made in inference mode cannot be saved for a backward pass."""
    rollout = decoder_of(qwen3).generate(Request(PROMPTS, 1, SamplingParams(3), 0))
    weight = torch.ones((), requires_grad=True)
    (weight * rollout.logprobs).sum().backward()
    assert float(weight.grad) == pytest.approx(float(rollout.logprobs.sum()), rel=1e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_stays_close_and_gives_float32_logprobs(qwen3, dtype):
    exact, rounded = decoder_of(qwen3), decoder_of(qwen3, dtype=dtype)
    rollout = rounded.generate(Request(PROMPTS, 4, SamplingParams(12, stop_token_ids=(3,)), 0))
    assert rollout.logprobs.dtype == torch.float32
    off = []
    for row, response in enumerate(responses(rollout)):
        want = logprobs_of(qwen3, PROMPTS[row // 4], response)
        off.append((rollout.logprobs[row, : len(response)] - want).abs())
    assert float(torch.cat(off).mean()) < (0.1 if dtype == torch.bfloat16 else 0.02)
    assert exact.decoder.weights.norm.dtype == torch.float32


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (lambda: FAMILIES["mistral"](sliding_window=64), "sliding_window=64"),
        (lambda: FAMILIES["qwen2"](**WINDOW, max_window_layers=1), "sliding_window=64"),
        (lambda: FAMILIES["llama"](attention_bias=True), "attention_bias"),
        (lambda: FAMILIES["llama"](hidden_act="gelu"), "hidden_act=gelu"),
        (lambda: FAMILIES["llama"](rope_parameters={"rope_type": "dynamic"} | ORIGINAL), "rope_type=dynamic"),
        (lambda: transformers.Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=16), "qwen3_moe"),
        (lambda: transformers.GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=1, n_head=2), "gpt2"),
    ],
)  # fmt: skip
def test_other_models_are_sampled_by_transformers(config, reason, caplog):
    made = config()
    with caplog.at_level(logging.INFO, "nemo_grpo"):
        generator = build_local("auto", made, torch.float32, "cpu", 8)
    assert isinstance(generator, HFGenerator)
    assert reason in caplog.text
    assert "generator hf" in caplog.text
    with pytest.raises(UserError, match="generator=decoder cannot sample from this model"):
        choose("decoder", made)


@pytest.mark.parametrize("wanted", ["auto", "decoder", "hf"])
def test_the_wanted_generator_is_built(qwen3, wanted):
    generator = build_local(wanted, qwen3.config, torch.float32, "cpu", 8)
    assert type(generator) is (HFGenerator if wanted == "hf" else DecoderGenerator)
    with pytest.raises(AssertionError, match="not complete"):
        generator.generate(Request(PROMPTS, 1, SamplingParams(2), 0))


def test_a_tied_folder_may_name_the_head(qwen3, tmp_path):
    qwen3.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)  # old exports have it
    save_file(weights, file, metadata={"format": "pt"})
    assert isinstance(build_local("auto", tmp_path, torch.float32, "cpu", 8), DecoderGenerator)


def test_a_folder_with_gaps_is_left_to_transformers_to_refuse(tmp_path):
    make_model(FAMILIES["llama"]()).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {"model.norm.weight": torch.zeros(31)}, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"cannot load .*'model\.norm\.weight' has shape \[31\]"):
        build_local("auto", tmp_path, torch.float32, "cpu", 8)
    del weights["model.norm.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks 1 weights .*: model\.norm\.weight"):
        build_local("auto", tmp_path, torch.float32, "cpu", 8)
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"cannot load a causal language model .*model\.safetensors"):
        build_local("auto", tmp_path, torch.float32, "cpu", 8)


def test_pickled_weights_are_left_to_transformers(tmp_path, caplog):
    make_model(FAMILIES["llama"]()).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with caplog.at_level(logging.INFO):
        assert choose("auto", tmp_path) == "hf"
    assert "in a safetensors file" in caplog.text
