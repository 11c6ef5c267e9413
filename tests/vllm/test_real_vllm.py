"""The vLLM generator with the real vLLM, against the engine's decoder; one engine for all, as vLLM has it."""

from types import SimpleNamespace

import pytest
import torch
from processes import ROOT, output_of, python
from taught_policy import assert_same, greedy, rows, vllm_of

from nemo_grpo.sampling.generate_decoder import DecoderGenerator
from nemo_grpo.sampling.generate_vllm import vllm_device
from nemo_grpo.sampling.requests import Request, SamplingParams, Turn
from nemo_grpo.support.errors import UserError

pytestmark = pytest.mark.vllm

MAX_MODEL_LEN = 128


@pytest.fixture(scope="module")
def vllm(model):
    return vllm_of(model, MAX_MODEL_LEN)


def test_greedy_responses_and_logprobs_are_the_decoders(model, vllm, tokenizer, prompts):
    request = Request(prompts, 1, greedy(tokenizer, 24), 0)
    ours, theirs = DecoderGenerator(model).generate(request), vllm.generate(request)
    assert_same(theirs, ours, atol=1e-4)
    assert torch.equal(theirs.truncated, ours.truncated)


def test_a_seed_stays_with_its_prompt_whatever_is_beside_it(vllm, tokenizer, prompts):
    """More prompt tokens than one step of vLLM takes: seeded requests must not be split on a CPU."""
    sampling = SamplingParams(12, 0.8, stop_token_ids=(tokenizer.eos_token_id,))
    many = [prompts[i % 32] + [5] * (MAX_MODEL_LEN - 12 - len(prompts[i % 32])) for i in range(64)]
    distinct = many[:32]
    forwards = vllm.generate(Request(many, 2, sampling, 3))
    backwards = vllm.generate(Request(distinct[::-1], 2, sampling, 3))
    pairs = [rows(backwards)[2 * i : 2 * i + 2] for i in range(32)]
    assert [response for pair in pairs[::-1] for response in pair] == rows(forwards)[:64]
    assert rows(vllm.generate(Request(distinct, 2, sampling, 4))) != rows(forwards)[:64]


def test_a_turn_ends_at_a_special_token(vllm, tokenizer, prompts):
    end = SimpleNamespace(texts=(tokenizer.eos_token,))
    rollout = vllm.generate(Request(prompts, 4, SamplingParams(24), 5, Turn([24] * len(prompts), end)))
    end_token, ended = tokenizer.eos_token_id, [tokenizer.eos_token_id in row for row in rows(rollout)]
    assert any(ended)
    assert all(row.index(end_token) == len(row) - 1 for row in rows(rollout) if end_token in row)
    assert rollout.truncated.tolist() == [not is_ended for is_ended in ended]


def test_samples_are_of_the_filtered_distribution(model, vllm, prompts):
    rollout = vllm.generate(Request(prompts[:8], 4, SamplingParams(16, 0.7, top_k=3), 1))
    decoder = DecoderGenerator(model)
    for i, row in enumerate(rows(rollout)):
        prompt = prompts[i // 4]
        logits = decoder.logits([prompt + row])[0, len(prompt) - 1 : len(prompt) - 1 + len(row)].float() / 0.7
        assert (logits.topk(3).indices == torch.tensor(row)[:, None]).any(-1).all()
        assert rollout.logprobs[i, : len(row)].isnan().all()


def test_the_other_device_is_refused():
    other = {"cpu": "cuda", "cuda": "cpu"}[vllm_device("auto")]
    with pytest.raises(UserError, match=f"device={other}"):
        vllm_device(other)


def test_a_recipes_own_problems_are_evaluated_and_vllm_is_quiet(model, tmp_path):
    """In a process of its own: vLLM has one engine in each."""
    process = python(
        "-c", "from nemo_grpo.cli import main; main()", "eval", "--model", model,
        "--recipe", ROOT / "recipes/quickstart.yaml", "--k", "2", "--num-problems", "4",
        "--out", tmp_path / "out", "nemo_grpo.engine.generator=vllm", "policy.generation.max_new_tokens=16",
    )  # fmt: skip
    said = output_of(process)
    assert "avg@2" in said
    assert '"generator": "vllm"' in (tmp_path / "out/summary.json").read_text()
    assert "MainProcess" not in said  # vLLM's log begins so


def test_a_cache_that_does_not_hold_one_response_is_one_line(model):
    with pytest.raises(UserError, match="vLLM cannot load") as error:
        vllm_of(model, MAX_MODEL_LEN, cache_bytes=1 << 50)
    assert "\n" not in str(error.value)
