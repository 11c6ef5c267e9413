"""Draws that belong to a token, against splitmix64 in plain integers."""

import struct
from hashlib import sha256

import pytest
import torch

from nemo_grpo.core.batch import TokenBatch
from nemo_grpo.core.random import response_ids, token_uniforms

WORD = 2**64


def mix(x: int) -> int:
    """One output of splitmix64 (Steele, Lea, Flood 2014) whose state was x."""
    x = (x + 0x9E3779B97F4A7C15) % WORD
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB % WORD
    return x ^ x >> 31


def test_mix_is_splitmix64():
    """The first numbers from state 0, as published with the generator."""
    golden = 0x9E3779B97F4A7C15
    assert [mix(n * golden % WORD) for n in range(2)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


def uniform(response: int, position: int, seed: int) -> float:
    return (mix(mix((response + seed) % WORD) ^ mix(position)) >> 11) / 2**53


MASK = torch.tensor([[False, True, False, True], [True, True, True, False]])
POSITIONS = [[None, 1, None, 2], [1, 2, 3, None]]


def batch(**further: torch.Tensor) -> TokenBatch:
    prev = -torch.arange(1, 9, dtype=torch.float32).view(2, 4) / 7
    return TokenBatch(
        prev_logprobs=prev,
        token_mask=MASK,
        sample_mask=torch.ones(2, dtype=torch.bool),
        rewards=torch.zeros(2),
        group_ids=torch.zeros(2, dtype=torch.int64),
        **further,
    )


@pytest.mark.parametrize("seed", [0, 123_456_789])
def test_a_tokens_number_is_a_hash_of_seed_response_and_position(seed):
    ids = [-5, 2**63 - 1]
    found = token_uniforms(batch(response_ids=torch.tensor(ids)), seed)
    for row, positions in enumerate(POSITIONS):
        for column, position in enumerate(positions):
            if position is not None:
                assert found[row, column].item() == uniform(ids[row], position, seed)


def test_without_ids_the_scored_logprobs_identify_a_response():
    made = batch()
    found = token_uniforms(made, 3)
    for row, positions in enumerate(POSITIONS):
        numbers = [float(made.prev_logprobs[row, at]) for at, position in enumerate(positions) if position]
        bits = [struct.unpack("<q", struct.pack("<d", number))[0] % WORD for number in numbers]
        response = sum(mix(each ^ mix(position)) for position, each in enumerate(bits, 1)) % WORD
        for column, position in enumerate(positions):
            if position is not None:
                assert found[row, column].item() == uniform(response, position, 3)


def test_ids_are_hashes_of_prompt_response_and_earlier_copies():
    responses = [([1, 2], [3]), ([1], [2, 3]), ([1, 2], [3])]
    texts = ["([1, 2], [3]) 0", "([1], [2, 3]) 0", "([1, 2], [3]) 1"]
    expected = [int.from_bytes(sha256(text.encode()).digest()[:8], "big", signed=True) for text in texts]
    assert response_ids(responses).tolist() == expected
