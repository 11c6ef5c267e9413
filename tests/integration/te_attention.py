"""Attention, rotary embedding and context parallelism of Transformer Engine's compiled extension, with torch.

After the C++ and CUDA sources of Transformer Engine 2.12; attention is written out, in float32, with the sums
of exponentials that the ring of context parallelism needs.
"""

import itertools
from collections.abc import Iterator
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor


def _enum(name: str, members: str) -> Any:
    return IntEnum(name, [f"NVTE_{member}" for member in members.split()], start=0)


NVTE_Bias_Type = _enum("NVTE_Bias_Type", "NO_BIAS PRE_SCALE_BIAS POST_SCALE_BIAS ALIBI")
NVTE_Mask_Type = _enum(
    "NVTE_Mask_Type",
    "NO_MASK PADDING_MASK CAUSAL_MASK PADDING_CAUSAL_MASK CAUSAL_BOTTOM_RIGHT_MASK "
    "PADDING_CAUSAL_BOTTOM_RIGHT_MASK",
)
NVTE_Softmax_Type = _enum("NVTE_Softmax_Type", "VANILLA_SOFTMAX OFF_BY_ONE_SOFTMAX LEARNABLE_SOFTMAX")
NVTE_QKV_Format = _enum("NVTE_QKV_Format", "SBHD BSHD THD BSHD_2SBHD SBHD_2BSHD THD_2BSHD THD_2SBHD")
NVTE_QKV_Layout = _enum(
    "NVTE_QKV_Layout",
    "SB3HD SBH3D SBHD_SB2HD SBHD_SBH2D SBHD_SBHD_SBHD BS3HD BSH3D BSHD_BS2HD BSHD_BSH2D BSHD_BSHD_BSHD "
    "T3HD TH3D THD_T2HD THD_TH2D THD_THD_THD SBHD_BSHD_BSHD BSHD_SBHD_SBHD THD_BSHD_BSHD THD_SBHD_SBHD "
    "Paged_KV_BSHD_BSHD_BSHD Paged_KV_BSHD_SBHD_SBHD Paged_KV_SBHD_BSHD_BSHD Paged_KV_SBHD_SBHD_SBHD "
    "Paged_KV_THD_BSHD_BSHD Paged_KV_THD_SBHD_SBHD",
)
NVTE_Fused_Attn_Backend = _enum(
    "NVTE_Fused_Attn_Backend", "F16_max512_seqlen F16_arbitrary_seqlen FP8 No_Backend"
)
_CAUSAL = (NVTE_Mask_Type.NVTE_CAUSAL_MASK, NVTE_Mask_Type.NVTE_PADDING_CAUSAL_MASK)
_PADDED = (NVTE_Mask_Type.NVTE_PADDING_MASK, NVTE_Mask_Type.NVTE_PADDING_CAUSAL_MASK)


def get_fused_attn_backend(is_training: bool, q_dtype: Any, kv_dtype: Any, *_more: Any) -> Any:
    """cuDNN's kernels take 16-bit numbers."""
    fits = q_dtype == kv_dtype and q_dtype.name in ("kFloat16", "kBFloat16")
    return getattr(NVTE_Fused_Attn_Backend, "NVTE_F16_arbitrary_seqlen" if fits else "NVTE_No_Backend")


class _Call:
    """Which queries meet which keys: pieces of one sequence each, as [H, S, D] views of the tensors given."""

    def __init__(
        self,
        layout: Any,
        mask: Any,
        lengths: tuple[Tensor, Tensor],
        starts: tuple[Tensor | None, Tensor | None],
    ) -> None:
        assert layout.name.count("_") == 3, layout  # q, k and v apart
        self.form = layout.name.split("_")[1]
        self.causal, self.mask = mask in _CAUSAL, mask
        assert self.causal or mask in (NVTE_Mask_Type.NVTE_NO_MASK, NVTE_Mask_Type.NVTE_PADDING_MASK), mask
        self.lengths = [x.diff().tolist() for x in lengths]
        self.starts = [(x if own is None else own).tolist() for x, own in zip(lengths, starts, strict=True)]

    def pieces(
        self, queries: list[Tensor], keys: list[Tensor]
    ) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Of each sequence the parts of the tensors on the side of the queries and on that of the keys."""
        if self.form == "THD":
            count = len(self.lengths[0])
        else:
            count = queries[0].shape[1 if self.form == "SBHD" else 0]
        for index in range(count):
            yield ([self._piece(x, index, 0) for x in queries], [self._piece(x, index, 1) for x in keys])

    def _piece(self, x: Tensor, index: int, side: int) -> Tensor:
        """[S, H, D] of one sequence -> [H, S, D]; a view."""
        if self.form == "THD":
            start = self.starts[side][index]
            part = x[start : start + self.lengths[side][index]]
        else:
            part = x[:, index] if self.form == "SBHD" else x[index]
            part = part[: self.lengths[side][index]] if self.mask in _PADDED else part
        return part.transpose(0, 1)

    def scores(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        found = scale * (q.float() @ _heads(k, q).transpose(1, 2))
        if self.causal:
            later = torch.ones(found.shape[1:], dtype=torch.bool).triu(1)
            found = found.masked_fill(later, -torch.inf)
        return found

    def lse_piece(self, lse: Tensor, index: int, length: int) -> Tensor:
        """[H, S] of one sequence; a view."""
        if self.form == "THD":
            start = self.starts[0][index]
            return lse[start : start + length, :, 0].t()
        return lse[index, :, :length, 0]


def fused_attn_fwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    is_training: bool,
    attn_scale: float,
    p_dropout: float,
    set_zero: bool,
    qkv_layout: Any,
    bias_type: Any,
    attn_mask_type: Any,
    softmax_type: Any,
    window_size: Any,
    bottom_right_diagonal: bool,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    fake_dtype: Any,
    cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None,
    *more: Any,
) -> list[Any]:
    """Output like q; logs of the sums of exponentials, [B, H, S, 1] or for thd [T, H, 1]; RNG state."""
    assert not p_dropout
    assert bias_type == 0
    assert softmax_type == 0
    assert not any(x is not None for x in more[:5])
    starts = (cu_seqlens_q_padded, cu_seqlens_kv_padded)
    call = _Call(qkv_layout, attn_mask_type, (cu_seqlens_q, cu_seqlens_kv), starts)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    heads = q.shape[-2]
    if call.form == "THD":
        lse = torch.zeros(q.shape[0], heads, 1)
    else:
        rows, length = (q.shape[1], q.shape[0]) if call.form == "SBHD" else q.shape[:2]
        lse = torch.zeros(rows, heads, length, 1)
    for index, ((one_q, one_out), (one_k, one_v)) in enumerate(call.pieces([q, out], [k, v])):
        scores = call.scores(one_q, one_k, attn_scale)
        total = scores.logsumexp(-1)
        one_out.copy_((scores - total[..., None]).exp() @ _heads(one_v, one_q))
        call.lse_piece(lse, index, one_q.shape[1]).copy_(total)
    return [out, lse, torch.zeros(2, dtype=torch.int64)] if is_training else [out]


def fused_attn_bwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    attn_scale: float,
    p_dropout: float,
    set_zero: bool,
    qkv_layout: Any,
    bias_type: Any,
    attn_mask_type: Any,
    softmax_type: Any,
    window_size: Any,
    bottom_right_diagonal: bool,
    deterministic: bool,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    d_o: Tensor,
    fake_dtype: Any,
    dqkv_dtype: Any,
    aux_ctx_tensors: list[Tensor],
    cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None,
    *more: Any,
) -> list[Any]:
    """Gradients like q, k and v; the sums of exponentials may be those of more keys than are given here."""
    starts = (cu_seqlens_q_padded, cu_seqlens_kv_padded)
    call = _Call(qkv_layout, attn_mask_type, (cu_seqlens_q, cu_seqlens_kv), starts)
    dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    for index, (own, others) in enumerate(call.pieces([q, o, d_o, dq], [k, v, dk, dv])):
        (one_q, one_o, one_do, one_dq), (one_k, one_v, one_dk, one_dv) = own, others
        lse = call.lse_piece(aux_ctx_tensors[0], index, one_q.shape[1])
        weights = (call.scores(one_q, one_k, attn_scale) - lse[..., None]).exp()
        grad = one_do.float()
        d_weights = grad @ _heads(one_v, one_q).transpose(1, 2)
        d_scores = attn_scale * weights * (d_weights - (grad * one_o.float()).sum(-1, keepdim=True))
        one_dq.copy_(d_scores @ _heads(one_k, one_q))
        one_dk.copy_((d_scores.transpose(1, 2) @ one_q.float()).unflatten(0, (len(one_k), -1)).sum(1))
        one_dv.copy_((weights.transpose(1, 2) @ grad).unflatten(0, (len(one_v), -1)).sum(1))
    return [dq, dk, dv, None, None]


def _heads(x: Tensor, q: Tensor) -> Tensor:
    """[G, S, D] of keys or values -> float32 [H, S, D], once for each head of the queries."""
    return x.float().repeat_interleave(q.shape[0] // x.shape[0], 0)


def _rope(t: Tensor, freqs: Tensor, form: Any, cu_seqlens: Tensor | None, cp: tuple[int, int]) -> Tensor:
    """Angles [..., 1, D2] of each token of t, by its place in its sequence."""
    size, rank = cp
    if form == NVTE_QKV_Format.NVTE_THD:
        assert cu_seqlens is not None
        places = torch.cat([_places(n // size, size, rank) for n in cu_seqlens.diff().tolist()])
        missing = t.shape[0] - len(places)
        return freqs[torch.cat([places, places.new_zeros(missing)]), 0]
    sequence = 0 if form == NVTE_QKV_Format.NVTE_SBHD else 1
    angles = freqs[_places(t.shape[sequence], size, rank), 0]
    return angles[:, None] if sequence == 0 else angles[None]


def _places(length: int, size: int, rank: int) -> Tensor:
    place = torch.arange(length)
    if size == 1:
        return place
    half = length // 2
    assert length % 2 == 0
    return torch.where(place < half, place + rank * half, place + length * size - (rank + 2) * half)


def fused_rope_forward(
    t: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None,
    qkv_format: Any,
    interleaved: bool,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    assert start_positions is None
    assert not interleaved
    assert freqs.dtype == torch.float32
    angles = _rope(t, freqs, qkv_format, cu_seqlens, (cp_size, cp_rank))
    width = freqs.shape[-1]
    x, rest = t[..., :width].float(), t[..., width:]
    first, second = x.chunk(2, -1)
    turned = x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()
    return torch.cat([turned.to(t.dtype), rest], -1)


def fused_rope_backward(
    grad: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None,
    qkv_format: Any,
    interleaved: bool,
    *more: Any,
) -> Tensor:
    """The turn back: by the sines of the other half, with the other sign."""
    angles = _rope(grad, freqs, qkv_format, more[0], (more[1], more[2]))
    width = freqs.shape[-1]
    x, rest = grad[..., :width].float(), grad[..., width:]
    first, second = (x * angles.sin()).chunk(2, -1)
    turned = x * angles.cos() + torch.cat([second, -first], -1)
    return torch.cat([turned.to(grad.dtype), rest], -1)


def _halves(cu_seqlens: Tensor, half: int) -> Tensor:
    """Indices of each sequence's first (0) or second (1) half."""
    ends = (cu_seqlens // 2).tolist()
    pairs = itertools.pairwise(ends)
    return torch.cat([torch.arange(a, b) + ends[i + half] for i, (a, b) in enumerate(pairs)])


def thd_read_half_tensor(tensor: Tensor, cu_seqlens: Tensor, half_idx: int) -> Tensor:
    return tensor.index_select(0 if tensor.dim() == 3 else 1, _halves(cu_seqlens, half_idx))


def thd_second_half_lse_correction(lse: Tensor, per_step: Tensor, cu_seqlens: Tensor, packed: bool) -> None:
    assert packed
    index = _halves(cu_seqlens, 1)
    lse[:, index] = torch.logaddexp(lse[:, index], per_step[:, : len(index)])


def thd_read_second_half_lse(lse: Tensor, cu_seqlens: Tensor, packed: bool, length: int) -> Tensor:
    assert packed
    index = _halves(cu_seqlens, 1)
    found = lse.new_zeros(lse.shape[0], length)
    found[:, : len(index)] = lse[:, index]
    return found


def thd_out_correction(
    out: Tensor,
    per_step: Tensor,
    lse: Tensor,
    lse_per_step: Tensor,
    cu_seqlens: Tensor,
    only_second_half: bool,
    packed: bool,
) -> None:
    assert packed
    index = _halves(cu_seqlens, 1) if only_second_half else torch.arange(int(cu_seqlens[-1]))
    count = len(index)
    weight = (lse_per_step[:, :count] - lse[:, index]).exp().t()[..., None]
    out[index] += (per_step[:count].float() * weight).to(out.dtype)


def thd_grad_correction(
    grad: Tensor, per_step: Tensor, cu_seqlens: Tensor, first_half: str, second_half: str
) -> None:
    """Add or copy a step's gradient, of both halves of each sequence or of the one that is not "none"."""
    only_one = "none" in (first_half, second_half)
    for half, how in enumerate((first_half, second_half)):
        if how == "none":
            continue
        index = _halves(cu_seqlens, half)
        source = slice(None, len(index)) if only_one else index
        for whole, step in [(grad, per_step)] if grad.dim() == 3 else zip(grad, per_step, strict=True):
            whole[index] = step[source] if how == "copy" else whole[index] + step[source]
