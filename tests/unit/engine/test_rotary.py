"""The engine's rotary embeddings against megatron-core's plain ones."""

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils

from nemo_grpo.engine.megatron import layers


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
