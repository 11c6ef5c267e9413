"""Entropies from NeMo-RL's scoring pass: its real post-processor and its real worker method."""

import contextlib
import types
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron_without_gpu import our_worker, stock_worker
from processes import free_port

VOCAB, LENGTHS, WIDTH = 16, [5, 8, 3], 10


def rows():
    """([3, WIDTH] right-padded token ids, [VOCAB, VOCAB] logits of the token behind each token)."""
    generator = torch.Generator().manual_seed(0)
    table = 2 * torch.randn(VOCAB, VOCAB, generator=generator)
    ids = torch.zeros(len(LENGTHS), WIDTH, dtype=torch.int64)
    for row, length in enumerate(LENGTHS):
        ids[row, :length] = torch.randint(0, VOCAB, (length,), generator=generator)
    return ids, table


def expected(ids, table, temperature):
    """(logprobs at the temperature, entropies at temperature 1), [3, WIDTH]; index 0 is 0."""
    logits = table[ids[:, :-1]]
    scaled = torch.log_softmax(logits / temperature, -1)
    plain = torch.log_softmax(logits, -1)
    pairs = scaled.gather(-1, ids[:, 1:, None])[..., 0], -(plain.exp() * plain).sum(-1)
    return tuple(torch.nn.functional.pad(x, (1, 0)) for x in pairs)


def sampling(temperature):
    return types.SimpleNamespace(temperature=temperature, top_k=None, top_p=1.0)


def join(rank, tensor, context, port):
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=tensor * context)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor, context_parallel_size=context, create_gloo_process_groups=False
    )


def score_on_a_rank(rank, layout, port, folder):
    """One rank of `EntropyPostProcessor` on its shard of tokens and vocabulary; rank 0 writes the result."""
    tensor, context, packed, temperature = layout
    worker = our_worker()
    torch.Tensor.cuda = lambda self, *_, **__: self
    join(rank, tensor, context, port)
    from megatron.core import parallel_state
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.distributed.model_utils import _get_tokens_on_this_cp_rank

    ids, table = rows()
    inputs, targets, starts = ids, ids, None
    if packed:
        padded = [-(-length // (2 * context)) * 2 * context for length in LENGTHS]
        starts = torch.tensor([0, *padded]).cumsum(0)
        targets = torch.zeros(1, int(starts[-1]), dtype=torch.int64)
        parts = []
        for row, length in enumerate(LENGTHS):
            targets[0, starts[row] : starts[row] + length] = ids[row, :length]
            whole = targets[0, starts[row] : starts[row + 1]]
            parts.append(
                _get_tokens_on_this_cp_rank(whole, parallel_state.get_context_parallel_rank(), context, 0)
            )
        inputs = torch.cat(parts)[None]
    share = VOCAB // tensor
    first = parallel_state.get_tensor_model_parallel_rank() * share
    logits = (table[inputs] / temperature)[..., first : first + share].contiguous()
    config = {"sequence_packing": {"enabled": packed}, "logprob_chunk_size": 4}
    process = worker.EntropyPostProcessor(cfg=config, sampling_params=sampling(temperature))(
        data_dict=BatchedDataDict(input_ids=ids, input_lengths=torch.tensor(LENGTHS)),
        input_ids=targets,
        cu_seqlens_padded=starts,
    )
    _, found = process(logits)
    if rank == 0:
        torch.save(found, Path(folder) / "found.pt")
    dist.destroy_process_group()


def assert_scored(found, temperature):
    for name, wanted in zip(("logprobs", "entropies"), expected(*rows(), temperature), strict=True):
        for row, length in enumerate(LENGTHS):
            torch.testing.assert_close(found[name][row, :length], wanted[row, :length])


@pytest.mark.parametrize(
    "layout",
    [(1, 1, False, 1.0), (1, 1, False, 0.6), (2, 1, True, 1.0), (2, 2, True, 0.6)],
    ids=["tp1", "tp1-T0.6", "tp2-packed", "tp2-cp2-packed-T0.6"],
)
def test_entropies_are_those_of_the_unsharded_distribution_at_temperature_one(layout, tmp_path):
    our_worker()  # imported once, here, and not on every rank
    num_ranks = layout[0] * layout[1]
    arguments = (layout, free_port(), str(tmp_path))
    mp.start_processes(score_on_a_rank, args=arguments, nprocs=num_ranks, start_method="fork")
    found = torch.load(tmp_path / "found.pt")
    assert found["entropies"].shape == (len(LENGTHS), WIDTH)
    assert_scored(found, layout[3])


@pytest.fixture
def worker_alone(monkeypatch):
    """Our worker on one rank with NeMo-RL's own ``get_logprobs``; the model is a table of logits."""
    stock, ours = stock_worker(), our_worker()
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    ids, table = rows()
    if not dist.is_initialized():
        join(0, 1, 1, free_port())

    def microbatches(data, *_, **__):
        parts = [data["input_ids"][:2, :8], data["input_ids"][2:]]  # of two widths, as dynamic batches are
        return iter(parts), 2, 2, WIDTH, WIDTH

    def forward(*, data_iterator, post_processing_fn, sampling_params, **_):
        found = []
        for part in data_iterator:
            logits = table[part] / sampling_params.temperature
            process = post_processing_fn(
                data_dict=BatchedDataDict(input_ids=part), input_ids=part, cu_seqlens_padded=None
            )
            found.append(process(logits)[1])
        return found

    for name in ("range_push", "range_pop"):
        monkeypatch.setattr(torch.cuda.nvtx, name, lambda *_: None)
    monkeypatch.setattr(stock, "get_microbatch_iterator", microbatches)
    monkeypatch.setattr(stock, "megatron_forward_backward", forward)
    monkeypatch.setattr(stock, "_should_use_router_replay", lambda **_: False)
    worker = object.__new__(ours.EntropyPolicyWorkerImpl)
    worker.cfg = {"sequence_packing": {"enabled": False}, "megatron_cfg": {}, "logprob_batch_size": 2}
    worker.timer = types.SimpleNamespace(start=lambda _: None, stop=lambda _: None)
    worker.model = torch.nn.Identity()
    worker.sampling_params = sampling(0.6)
    worker.mcore_state = types.SimpleNamespace(straggler_timer=None)
    worker.defer_fp32_logits = worker._router_replay_enabled = False
    for name in ("media_placeholder_token_id", "delegate_pack_to_model", "delegate_mtp_loss_mask_to_model"):
        setattr(worker, name, None)
    worker.model_slices_context_parallel_inputs = None
    worker.use_reference_model = contextlib.nullcontext
    yield worker, BatchedDataDict(input_ids=ids, input_lengths=torch.tensor(LENGTHS)), stock
    dist.destroy_process_group()
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()


def test_worker_returns_entropies_beside_logprobs(worker_alone):
    worker, data, stock = worker_alone
    original = stock.LogprobsPostProcessor
    assert set(worker.get_reference_policy_logprobs(data=data)) == {"reference_logprobs"}
    assert not worker.in_reference
    assert_scored(worker.get_logprobs(data=data), 0.6)
    assert stock.LogprobsPostProcessor is original


@pytest.mark.parametrize(("last", "scaled"), [(True, 2.0), (False, 1.0)])
def test_only_the_last_pipeline_stage_divides_its_output_by_the_temperature(monkeypatch, last, scaled):
    ours = our_worker()
    from megatron.core import parallel_state
    from nemo_rl.models.megatron import train

    no_scores = {"__init__": lambda self: None, "__call__": lambda self, **_: None}
    scores = type("Scores", (ours.LogprobsPostProcessor,), no_scores)
    monkeypatch.setattr(train, "apply_temperature_scaling", ours.scale_logits_only)
    monkeypatch.setattr(train, "model_forward", lambda **_: torch.ones(1, 2, 4))
    monkeypatch.setattr(parallel_state, "is_pipeline_last_stage", lambda **_: last)
    output, _ = train.forward_with_post_processing_fn(
        iter([mock.Mock()]), torch.nn.Identity(), scores(), sampling_params=sampling(0.5)
    )
    assert (output == scaled).all()
