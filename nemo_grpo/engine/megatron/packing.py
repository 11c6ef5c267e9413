"""Several sequences as one stream of tokens without padding; a prompt's responses share its tokens.

    stream     prompt a, prompt b, ..., then response a1, a2, ..., b1, b2, ...      [1, T]
    positions  0 .. P_a - 1, 0 .. P_b - 1, ..., P_a .., P_a .., ..., P_b ..         for the rotary embedding

Layers that treat each token alone (embedding, norms, matrices, the vocabulary) see the stream; only attention
lays prompts and responses out in padded rows (`layers.CausalAttention`): a prompt attends to itself, a
response to its prompt and itself. So a prompt of G responses is computed once instead of G times, and logits
are computed only where a response's token is predicted.

Transformer Engine's attention has no shared prompts: there the stream is one whole sequence after the other,
megatron-core's ``thd`` format. Under context parallelism a rank has two slices (`zigzag`) of the stream, or
of each of those sequences, which are padded for it.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.nn import functional

from nemo_grpo.core.batch import Sequences, on_device
from nemo_grpo.engine.megatron.parallel import zigzag, zigzag_multiple

SHARED, THD = "shared prompts", "thd"
"""Values of `PackedSequences.qkv_format`; megatron-core knows the second one."""


@dataclass(frozen=True)
class PaddedRows:
    """Positions of a stream's tokens in padded rows, and back.

    Attributes: inside: [R, L] bool, False in padding.
                token: [R x L] int64, the token at each place; arbitrary in padding.
                place: [number of tokens] int64, each token's place.
    """

    inside: Tensor
    token: Tensor
    place: Tensor

    @classmethod
    def of(cls, lengths: Tensor) -> Self:
        """Lay out consecutive rows of these lengths."""
        inside = torch.arange(int(lengths.max()), device=lengths.device) < lengths[:, None]
        flat = inside.flatten()
        return cls(inside, (flat.cumsum(0) - 1).clamp(min=0), flat.nonzero()[:, 0])

    def lay_out(self, x: Tensor) -> Tensor:
        """Move [tokens, ...] to [R, L, ...]; padding holds finite values, whose gradient is dropped."""
        rows = _Move.apply(x, self.token, self.place, None)
        return rows.view(*self.inside.shape, *x.shape[1:])

    def collect(self, rows: Tensor) -> Tensor:
        """Move [R, L, ...] to [tokens, ...]; the padding's gradient is 0."""
        return _Move.apply(rows.flatten(0, 1), self.place, self.token, ~self.inside.flatten())


class _Move(torch.autograd.Function):
    """x[there]; each row of x that matters is taken exactly once, so the gradient is a lookup by ``back``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Tensor, back: Tensor, without: Tensor | None) -> Tensor:
        ctx.save_for_backward(back, without)
        return x.index_select(0, there)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        back, without = ctx.saved_tensors
        found = gradient.index_select(0, back)
        if without is not None:
            found.masked_fill_(without.view(-1, *[1] * (found.dim() - 1)), 0.0)
        return found, None, None, None


@dataclass(frozen=True)
class AttentionPlan:
    """Attention mask of a packed row.

    Attributes:
        prompts: rows of tokens that attend causally among themselves, first in the stream.
        responses: rows after them in the stream; they attend causally to themselves, and to their prompt.
        prompt_of: [responses] int64, row of each response's prompt.
        bias: [responses, 1, L_r, L_p + L_r], 0 where a response's token attends, -inf where not.
    """

    prompts: PaddedRows
    responses: PaddedRows | None = None
    prompt_of: Tensor | None = None
    bias: Tensor | None = None

    @classmethod
    def shared(cls, prompt_lengths: Tensor, prompt_of: Tensor, lengths: Tensor, dtype: torch.dtype) -> Self:
        """Plan prompts of these lengths, and responses (``lengths`` each, 0 allowed) that follow them."""
        prompts = PaddedRows.of(prompt_lengths)
        if not lengths.any():
            return cls(prompts)
        responses = PaddedRows.of(lengths)
        column = torch.arange(responses.inside.shape[1], device=lengths.device)
        causal = (column[:, None] >= column).expand(len(lengths), -1, -1)
        prompt = prompts.inside[prompt_of][:, None].expand(-1, len(column), -1)
        may = torch.cat([prompt, causal], 2)[:, None]
        bias = torch.zeros(may.shape, dtype=dtype, device=may.device).masked_fill_(~may, -torch.inf)
        return cls(prompts, responses, prompt_of, bias)

    def num_tokens(self) -> tuple[int, int]:
        """Count the tokens in prompts and in responses."""
        return len(self.prompts.place), 0 if self.responses is None else len(self.responses.place)


@dataclass(kw_only=True)
class PackedSequences(PackedSeqParams):
    """A microbatch as one stream; the inherited ``cu_seqlens_*`` are set in the ``thd`` format only.

    Attributes:
        input_ids: [1, T] int64.
        positions: [T] int64.
        own: [T / CP] int64, the places in the stream that this context-parallel rank computes.
        attention: for `layers.CausalAttention`; Transformer Engine's goes by ``cu_seqlens_*``.
        predicting: [N] int64, the places in this rank's share of the stream whose logits are needed.
        targets: [N] int64, the tokens that they predict.
        rows, columns: [N] int64, where results go in the microbatch's [B, T] tensors.
    """

    input_ids: Tensor
    positions: Tensor
    own: Tensor = None  # type: ignore[assignment]  # known when the stream is laid out
    attention: AttentionPlan | None = None
    predicting: Tensor
    targets: Tensor
    rows: Tensor
    columns: Tensor


def pack(
    sequences: Sequences, *, multiple: int, share_prompts: bool, dtype: torch.dtype, device: torch.device
) -> PackedSequences:
    """Pack sequences into a stream, each without its last token, which predicts nothing.

    Args: multiple: divides T; unused tokens at the end fill the stream up.
          share_prompts: False for the ``thd`` format.  dtype: of the attention's bias.
    """
    ids, lengths = sequences.input_ids, sequences.lengths
    starts = sequences.prompt_lengths if share_prompts else lengths - 1
    first, prompt_of = _first_rows(sequences.prompt_ids if share_prompts else torch.arange(len(lengths)))
    column = torch.arange(ids.shape[1])
    in_prompt = column < starts[first, None]
    in_response = (column >= starts[:, None]) & (column < lengths[:, None] - 1)
    stream = torch.cat([ids[first][in_prompt], ids[in_response]])
    positions = torch.cat([in_prompt.nonzero()[:, 1], in_response.nonzero()[:, 1]])
    # the place of each row's token in the stream, whether in its prompt or in its response
    place = torch.zeros_like(ids)
    place[in_response] = torch.arange(len(stream) - int(in_response.sum()), len(stream))
    in_prompts = torch.zeros_like(in_prompt, dtype=torch.int64)
    in_prompts[in_prompt] = torch.arange(int(in_prompt.sum()))
    place = torch.where(column < starts[:, None], in_prompts[prompt_of], place)
    predicts = (column >= sequences.prompt_lengths[:, None] - 1) & (column < lengths[:, None] - 1)
    rows, columns = predicts.nonzero().unbind(1)
    packed = PackedSequences(
        input_ids=stream[None],
        positions=positions,
        predicting=place[predicts],
        targets=ids[rows, columns + 1],
        rows=rows,
        columns=columns,
    )
    packed.attention = AttentionPlan.shared(starts[first], prompt_of, lengths - 1 - starts, dtype)
    if share_prompts:
        packed.qkv_format = SHARED
        packed.max_seqlen_q = packed.max_seqlen_kv = int(lengths.max()) - 1
        _pad(packed, torch.arange(len(stream)), len(stream) + -len(stream) % multiple)
        packed.own = zigzag(packed.input_ids.shape[1])
    else:
        _lay_out_as_thd(packed, lengths - 1, multiple)
    return on_device(_own_share(packed), device)  # planning on a GPU would synchronise many times


def _pad(packed: PackedSequences, places: Tensor, length: int) -> None:
    """Move the stream's tokens to these places of a stream of this length; the gaps are padding."""
    packed.input_ids = packed.input_ids.new_zeros(1, length).index_copy(1, places, packed.input_ids)
    packed.positions = packed.positions.new_zeros(length).index_copy(0, places, packed.positions)
    packed.predicting = places[packed.predicting]


def _lay_out_as_thd(packed: PackedSequences, lengths: Tensor, multiple: int) -> None:
    """Lay out whole sequences, each padded for context parallelism; further padding is one more sequence."""
    padded = lengths + -lengths % zigzag_multiple()
    if rest := -int(padded.sum()) % multiple:
        padded = torch.cat([padded, padded.new_tensor([rest])])
    ends = functional.pad(padded.cumsum(0), (1, 0))
    starts = ends[: len(lengths)].repeat_interleave(lengths)
    _pad(packed, starts + packed.positions, int(ends[-1]))
    packed.qkv_format = THD
    packed.own = torch.cat([zigzag(int(n)) + start for n, start in zip(padded, ends[:-1], strict=True)])
    packed.cu_seqlens_q = packed.cu_seqlens_kv = ends.to(torch.int32)
    packed.max_seqlen_q = packed.max_seqlen_kv = int(padded.max())  # the padding may be the longest


def _first_rows(prompt_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return (one row of each prompt, each row's prompt)."""
    _, prompt_of = prompt_ids.unique(return_inverse=True)
    first = torch.empty(int(prompt_of.max()) + 1, dtype=torch.int64)
    first[prompt_of] = torch.arange(len(prompt_of))
    return first, prompt_of


def _own_share(packed: PackedSequences) -> PackedSequences:
    """Keep the predictions of this context-parallel rank, at places in its own share of the stream."""
    own, length = packed.own, packed.input_ids.shape[1]
    if len(own) == length:
        return packed
    place = torch.full((length,), -1)
    place[own] = torch.arange(len(own))
    mine = place[packed.predicting] >= 0
    packed.predicting = place[packed.predicting][mine]
    packed.targets, packed.rows, packed.columns = (
        x[mine] for x in (packed.targets, packed.rows, packed.columns)
    )
    return packed
