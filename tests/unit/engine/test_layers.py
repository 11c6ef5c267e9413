"""The local layers' own arithmetic against torch's."""

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional

from nemo_grpo.engine.megatron import layers
from nemo_grpo.engine.megatron.layers import CausalAttention, RMSNorm


def config(dtype: torch.dtype) -> TransformerConfig:
    sizes = {"num_layers": 1, "hidden_size": 24, "num_attention_heads": 3, "num_query_groups": 1}
    return TransformerConfig(**sizes, params_dtype=dtype, bf16=dtype == torch.bfloat16)


def norm_and_input(dtype: torch.dtype) -> tuple[RMSNorm, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    norm = RMSNorm(config(dtype), 24, eps=1e-5).to(dtype)
    torch.nn.init.normal_(norm.weight, mean=1.0)
    x, gradient = (torch.randn(7, 2, 24, dtype=dtype) for _ in range(2))
    x[3] *= 1e-3  # where eps counts
    return norm, x.requires_grad_(), gradient


def test_rms_norm_is_torchs():
    norm, x, gradient = norm_and_input(torch.float64)
    expected = functional.rms_norm(x, (24,), norm.weight, 1e-5)
    torch.testing.assert_close(norm(x), expected, rtol=1e-12, atol=1e-12)
    found, wanted = (torch.autograd.grad(y, (x, norm.weight), gradient) for y in (norm(x), expected))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_rms_norm_in_bf16_rounds_once():
    norm, x, gradient = norm_and_input(torch.bfloat16)
    exact = functional.rms_norm(x.double(), (24,), norm.weight.double(), 1e-5)
    torch.testing.assert_close(norm(x), exact.bfloat16(), rtol=2**-8, atol=0.0)
    found = torch.autograd.grad(norm(x), (x, norm.weight), gradient)
    wanted = torch.autograd.grad(exact, (x, norm.weight), gradient.double())
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours, theirs.bfloat16(), rtol=2**-7, atol=2**-7)


def test_bf16_attention_rounds_its_result_once():
    torch.manual_seed(0)
    attention = CausalAttention(config(torch.bfloat16), 1, None, "self")
    query = torch.randn(9, 2, 3, 8).bfloat16().requires_grad_()
    key, value = (torch.randn(9, 2, 1, 8).bfloat16().requires_grad_() for _ in range(2))
    found = attention(query, key, value)
    with torch.no_grad():
        q, k, v = (x.double().transpose(0, 1).transpose(1, 2) for x in (query, key, value))
        exact = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, exact.permute(2, 0, 1, 3).flatten(2).bfloat16(), rtol=2**-8, atol=1e-6)
    found.sum().backward()
    assert query.grad is not None
    assert query.grad.dtype == torch.bfloat16


def angles(seed: int) -> torch.Tensor:
    half = 20 * torch.rand(5, 1, 1, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.cat([half, half], -1)


def heads(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(5, 2, 3, 8, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 2**-6)])
def test_heads_are_turned_as_megatron_core_turns_them(dtype, tolerance):
    x, gradient = heads(dtype), heads(dtype).detach().flip(0)
    for seed in (0, 1, 0):  # other angles are not taken for those before
        ours, theirs = layers.rotate(x, angles(seed)), layers._plain_rotary(x, angles(seed))
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)
        found, expected = (torch.autograd.grad(y, x, gradient)[0] for y in (ours, theirs))
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    "options", [{"rotary_interleaved": True}, {"multi_latent_attention": True}, {"mscale": 1.5}, {"width": 4}]
)
def test_what_it_does_not_have_is_megatron_cores(options):
    x, of = heads(torch.float64).detach(), angles(0)[..., : options.pop("width", 8)]
    assert torch.equal(layers.rotate(x, of, **options), layers._plain_rotary(x, of, **options))


def test_megatron_core_uses_it(monkeypatch):
    monkeypatch.setattr(rope_utils, "_apply_rotary_pos_emb_bshd", layers._plain_rotary)
    layers.use_own_rotary()
    assert rope_utils._apply_rotary_pos_emb_bshd is layers.rotate
