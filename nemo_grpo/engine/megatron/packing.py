"""Packing: several sequences as one stream of tokens without padding, in which responses share their prompt.

    stream     prompt a, prompt b, ..., then response a1, a2, ..., b1, b2, ...      [1, T]
    positions  0 .. P_a - 1, 0 .. P_b - 1, ..., P_a .., P_a .., ..., P_b ..         for the rotary embedding

Layers that treat each token alone (embedding, norms, linear layers, output layer) see the stream. Only the
attention lays prompts and responses out in padded rows (`layers.CausalAttention`): a prompt attends to
itself, a response to its prompt and to itself. So a prompt of G responses is computed once instead of G
times, and logits are computed only where a response's token is predicted.

Transformer Engine's attention does not support shared prompts. For it the stream is one whole sequence after
the other, in megatron-core's ``thd`` format. Under context parallelism a rank has two slices (`zigzag`) of
the stream or, in the thd format, of each sequence, which is padded for that.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.nn import functional

from nemo_grpo.core.batch import Sequences, on_device
from nemo_grpo.engine.megatron.parallel import zigzag, zigzag_multiple

SHARED = "shared prompts"
"""Value of `PackedSequences.qkv_format` for shared prompts, which only `layers` and `model` know."""
THD = "thd"
"""Value of `PackedSequences.qkv_format` for whole sequences, megatron-core's own."""


@dataclass(frozen=True)
class PaddedRows:
    """Layout of a stream's tokens in padded rows: the token at each place, and the place of each token.

    Attributes:
        inside: [R, L] bool, False in padding.
        token: [R x L] int64, number of the token at each place; arbitrary in padding.
        place: [number of tokens] int64, place of each token in the flattened rows.
    """

    inside: Tensor
    token: Tensor
    place: Tensor

    @classmethod
    def of(cls, lengths: Tensor) -> Self:
        """Lay out a stream that consists of rows of these lengths, one after the other."""
        inside = torch.arange(int(lengths.max()), device=lengths.device) < lengths[:, None]
        flat = inside.flatten()
        # Counting the places inside rows numbers the tokens. Padding repeats the number of the token before
        # it.
        token = (flat.cumsum(0) - 1).clamp(min=0)
        place = flat.nonzero()[:, 0]
        return cls(inside, token, place)

    def lay_out(self, x: Tensor) -> Tensor:
        """Move [tokens, ...] to [R, L, ...]. Padding gets finite values, whose gradient is dropped."""
        rows = _Move.apply(x, self.token, self.place, None)
        return rows.view(*self.inside.shape, *x.shape[1:])

    def collect(self, rows: Tensor) -> Tensor:
        """Move [R, L, ...] to [tokens, ...]. The gradient of the padding is 0."""
        return _Move.apply(rows.flatten(0, 1), self.place, self.token, ~self.inside.flatten())


class _Move(torch.autograd.Function):
    """Lookup x[source] in which every row of x, except padding, is read for exactly one row of the result.

    So the gradient is a lookup, too. autograd does not know that, and would add rows up, which is slower.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, destination: Tensor, padding: Tensor | None) -> Tensor:
        """Move rows of x.

        Args:
            x: Rows to move.
            source: Row of x for each row of the result.
            destination: Row of the result for each row of x.
            padding: [rows of x] bool, True for rows whose gradient is 0; None if there are none.
        """
        ctx.save_for_backward(destination, padding)
        return x.index_select(0, source)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        destination, padding = ctx.saved_tensors
        of_x = gradient.index_select(0, destination)
        if padding is not None:
            of_x.masked_fill_(padding.view(-1, *[1] * (of_x.dim() - 1)), 0.0)
        return of_x, None, None, None


@dataclass(frozen=True)
class AttentionPlan:
    """Layout and mask of the attention in a packed stream.

    Attributes:
        prompts: Rows of the prompts, which come first in the stream. Each attends causally to itself.
        responses: Rows of the responses, which follow. Each attends causally to itself, and to its prompt.
        prompt_of: [responses] int64, row of each response's prompt.
        bias: [responses, 1, L_r, L_p + L_r], 0 where a response's token attends, -inf elsewhere.
    """

    prompts: PaddedRows
    responses: PaddedRows | None = None
    prompt_of: Tensor | None = None
    bias: Tensor | None = None

    @classmethod
    def shared(cls, prompt_lengths: Tensor, prompt_of: Tensor, lengths: Tensor, dtype: torch.dtype) -> Self:
        """Plan the attention of a stream in which all prompts come first, then all responses.

        Args:
            prompt_lengths: [prompts], length of each prompt.
            prompt_of: [responses], row of each response's prompt.
            lengths: [responses], length of each response, which may be 0.
            dtype: Precision of the bias.
        """
        prompts = PaddedRows.of(prompt_lengths)
        if not lengths.any():
            return cls(prompts)

        responses = PaddedRows.of(lengths)
        column = torch.arange(responses.inside.shape[1], device=lengths.device)
        attends_to_response = (column[:, None] >= column).expand(len(lengths), -1, -1)
        attends_to_prompt = prompts.inside[prompt_of][:, None].expand(-1, len(column), -1)
        attends = torch.cat([attends_to_prompt, attends_to_response], 2)[:, None]
        bias = torch.zeros(attends.shape, dtype=dtype, device=attends.device)
        bias.masked_fill_(~attends, -torch.inf)
        return cls(prompts, responses, prompt_of, bias)

    def num_tokens(self) -> tuple[int, int]:
        """Count the tokens in prompts and in responses."""
        num_in_responses = 0 if self.responses is None else len(self.responses.place)
        return len(self.prompts.place), num_in_responses


@dataclass(kw_only=True)
class PackedSequences(PackedSeqParams):
    """A microbatch as one stream. The inherited ``cu_seqlens_*`` are set only in the ``thd`` format.

    Attributes:
        input_ids: [1, T] int64.
        positions: [T] int64, position of each token in its sequence.
        local_places: [T / CP] int64, places in the stream that this context-parallel rank computes.
        attention: Plan for `layers.CausalAttention`. Transformer Engine's attention reads ``cu_seqlens_*``.
        predicting: [N] int64, places in this rank's share of the stream whose logits are needed.
        targets: [N] int64, tokens that these logits predict.
        rows: [N] int64, row of the microbatch's [B, T] tensors for each result.
        columns: [N] int64, column of these tensors for each result.
    """

    input_ids: Tensor
    positions: Tensor
    # The layout of the stream needs the other fields, so this one is set last and is None until then.
    local_places: Tensor = None  # type: ignore[assignment]
    attention: AttentionPlan | None = None
    predicting: Tensor
    targets: Tensor
    rows: Tensor
    columns: Tensor


def pack(
    sequences: Sequences, *, multiple: int, share_prompts: bool, dtype: torch.dtype, device: torch.device
) -> PackedSequences:
    """Pack sequences into a stream. The last token of each is left out, because it predicts nothing.

    Args:
        sequences: Sequences of the microbatch.
        multiple: Divisor of T. Unused tokens at the end fill the stream up.
        share_prompts: True if responses share their prompt's tokens, False for the ``thd`` format.
        dtype: Precision of the attention's bias.
        device: Device of the result.
    """
    ids = sequences.input_ids
    num_inputs = sequences.lengths - 1
    # In the thd format each whole sequence stands in the stream like a prompt without responses.
    prompt_lengths = sequences.prompt_lengths if share_prompts else num_inputs
    prompt_ids = sequences.prompt_ids if share_prompts else torch.arange(len(num_inputs))
    first_rows, prompt_of = _first_rows(prompt_ids)

    column = torch.arange(ids.shape[1])
    in_prompt = column < prompt_lengths[first_rows, None]
    in_response = (column >= prompt_lengths[:, None]) & (column < num_inputs[:, None])
    stream = torch.cat([ids[first_rows][in_prompt], ids[in_response]])
    positions = torch.cat([in_prompt.nonzero()[:, 1], in_response.nonzero()[:, 1]])

    place = _places(in_prompt, in_response, prompt_lengths, prompt_of)
    predicts = (column >= sequences.prompt_lengths[:, None] - 1) & (column < num_inputs[:, None])
    rows, columns = predicts.nonzero().unbind(1)
    packed = PackedSequences(
        input_ids=stream[None],
        positions=positions,
        predicting=place[predicts],
        targets=ids[rows, columns + 1],
        rows=rows,
        columns=columns,
    )
    packed.attention = AttentionPlan.shared(
        prompt_lengths[first_rows], prompt_of, num_inputs - prompt_lengths, dtype
    )
    if share_prompts:
        packed.qkv_format = SHARED
        longest = int(num_inputs.max())
        packed.max_seqlen_q = longest
        packed.max_seqlen_kv = longest
        _pad(packed, torch.arange(len(stream)), len(stream) + -len(stream) % multiple)
        packed.local_places = zigzag(packed.input_ids.shape[1])
    else:
        _lay_out_as_thd(packed, num_inputs, multiple)
    # Everything is planned on the host, because on a GPU the host would wait for each of these sizes.
    return on_device(_local_share(packed), device)


def _places(in_prompt: Tensor, in_response: Tensor, prompt_lengths: Tensor, prompt_of: Tensor) -> Tensor:
    """Return the place of each row's tokens in the stream, [B, S] int64, arbitrary in padding.

    Args:
        in_prompt: [prompts, S] bool, True for tokens of a prompt.
        in_response: [B, S] bool, True for tokens of a response.
        prompt_lengths: [B], length of each row's prompt.
        prompt_of: [B], prompt of each row.
    """
    num_in_prompts = int(in_prompt.sum())
    num_in_responses = int(in_response.sum())
    prompt_place = torch.zeros(in_prompt.shape, dtype=torch.int64)
    prompt_place[in_prompt] = torch.arange(num_in_prompts)
    response_place = torch.zeros(in_response.shape, dtype=torch.int64)
    # Responses follow all prompts in the stream.
    response_place[in_response] = torch.arange(num_in_prompts, num_in_prompts + num_in_responses)
    column = torch.arange(in_response.shape[1])
    return torch.where(column < prompt_lengths[:, None], prompt_place[prompt_of], response_place)


def _pad(packed: PackedSequences, places: Tensor, length: int) -> None:
    """Move the tokens to other places, in a stream of this length. The gaps become padding."""
    packed.input_ids = packed.input_ids.new_zeros(1, length).index_copy(1, places, packed.input_ids)
    packed.positions = packed.positions.new_zeros(length).index_copy(0, places, packed.positions)
    packed.predicting = places[packed.predicting]


def _lay_out_as_thd(packed: PackedSequences, lengths: Tensor, multiple: int) -> None:
    """Lay the stream out in the thd format: pad each sequence for context parallelism.

    If the stream must be longer to fit ``multiple``, the padding at its end counts as one more sequence.
    """
    padded_lengths = lengths + -lengths % zigzag_multiple()
    num_filling = -int(padded_lengths.sum()) % multiple
    if num_filling:
        padded_lengths = torch.cat([padded_lengths, padded_lengths.new_tensor([num_filling])])
    # [0, end of the first sequence, end of the second one, ...]
    boundaries = functional.pad(padded_lengths.cumsum(0), (1, 0))
    sequence_starts = boundaries[: len(lengths)].repeat_interleave(lengths)
    _pad(packed, sequence_starts + packed.positions, int(boundaries[-1]))
    packed.qkv_format = THD
    # Each sequence is cut over the context-parallel ranks separately.
    local_places = [
        zigzag(int(length)) + start for length, start in zip(padded_lengths, boundaries[:-1], strict=True)
    ]
    packed.local_places = torch.cat(local_places)
    cu_seqlens = boundaries.to(torch.int32)
    packed.cu_seqlens_q = cu_seqlens
    packed.cu_seqlens_kv = cu_seqlens
    # The padding at the end counts, too: it may be longer than any sequence.
    longest = int(padded_lengths.max())
    packed.max_seqlen_q = longest
    packed.max_seqlen_kv = longest


def _first_rows(prompt_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Number the different prompts. Return the index of one row with each prompt, and each row's prompt."""
    _, prompt_of = prompt_ids.unique(return_inverse=True)
    first_rows = torch.empty(int(prompt_of.max()) + 1, dtype=torch.int64)
    first_rows[prompt_of] = torch.arange(len(prompt_of))
    return first_rows, prompt_of


def _local_share(packed: PackedSequences) -> PackedSequences:
    """Keep only the predictions of this context-parallel rank, and count places within its share."""
    length = packed.input_ids.shape[1]
    if len(packed.local_places) == length:
        return packed
    local_place = torch.full((length,), -1)
    local_place[packed.local_places] = torch.arange(len(packed.local_places))
    is_local = local_place[packed.predicting] >= 0
    packed.predicting = local_place[packed.predicting][is_local]
    packed.targets = packed.targets[is_local]
    packed.rows = packed.rows[is_local]
    packed.columns = packed.columns[is_local]
    return packed
