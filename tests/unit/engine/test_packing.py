"""Who computes what of a packed microbatch, by the tokens of the rows themselves."""

import pytest
import torch
from torch import Tensor

from nemo_grpo.core.batch import Sequences
from nemo_grpo.engine.megatron import packing
from nemo_grpo.engine.megatron.packing import PackedSequences, pack
from nemo_grpo.engine.megatron.parallel import zigzag_positions

PROMPT_LENGTHS, LENGTHS, PROMPT_IDS = [1, 1, 3, 1], [6, 4, 9, 2], [7, 7, 3, 5]


def rows() -> Sequences:
    """Token 100 r + c in row r, column c; two rows share their prompt."""
    ids = torch.arange(4)[:, None] * 100 + torch.arange(9)
    ids[1, 0] = ids[0, 0]
    return Sequences(ids, *map(torch.tensor, (LENGTHS, PROMPT_LENGTHS, PROMPT_IDS)))


def share(size: int, rank: int, share_prompts: bool, monkeypatch: pytest.MonkeyPatch) -> PackedSequences:
    def own(length: int, device: torch.device | None = None) -> Tensor:
        return zigzag_positions(length, size, rank, device)

    monkeypatch.setattr(packing, "zigzag", own)
    monkeypatch.setattr(packing, "zigzag_multiple", lambda: 2 * size if size > 1 else 1)
    how = {"share_prompts": share_prompts, "dtype": torch.float32, "device": torch.device("cpu")}
    return pack(rows(), multiple=2 * size, **how)


@pytest.mark.parametrize("share_prompts", [True, False], ids=["shared prompts", "thd"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_context_parallel_ranks_predict_each_response_token_once(size, share_prompts, monkeypatch):
    found = []
    for rank in range(size):
        packed = share(size, rank, share_prompts, monkeypatch)
        row_of, columns = packed.rows.tolist(), packed.columns.tolist()
        before = packed.input_ids[0, packed.local_places][packed.predicting].tolist()
        ids = rows().input_ids
        assert before == ids[row_of, columns].tolist()
        assert packed.targets.tolist() == [100 * r + c + 1 for r, c in zip(row_of, columns, strict=True)]
        assert packed.positions[packed.local_places][packed.predicting].tolist() == columns
        found += zip(row_of, columns, strict=True)
    assert sorted(found) == [
        (row, column)
        for row, (prompt, length) in enumerate(zip(PROMPT_LENGTHS, LENGTHS, strict=True))
        for column in range(prompt - 1, length - 1)
    ]
