"""A language model that somebody else trained, through every part: transformers computes the same.

SmolLM2-135M-Instruct: 30 layers, 9 heads and 3 groups, tied embeddings of 49,152 tokens, a chat template.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from smollm2_model import TASK, model_folder, prompts_of
from toy_policies import token_batch
from transformers import AutoModelForCausalLM

from checkpoints_conv.hf_to_megatron import hf_to_megatron
from checkpoints_conv.megatron_to_hf import megatron_to_hf
from nemo_grpo import build_objective
from nemo_grpo.core.batch import Sequences
from nemo_grpo.engine.megatron.policy import MegatronPolicy
from nemo_grpo.recipe.layout import Layout
from nemo_grpo.recipe.megatron_sections import MegatronOptimizer
from nemo_grpo.sampling.generate_decoder import DecoderGenerator
from nemo_grpo.sampling.generate_hf import HFGenerator
from nemo_grpo.sampling.requests import Request, SamplingParams
from nemo_grpo.support.hf_folder import load_config, load_tokenizer, load_weights

pytestmark = pytest.mark.slow
SETTINGS = MegatronOptimizer(lr=1e-5, adam_eps=1e-4, clip_grad=1.0)
LAYOUTS = {"tp3": (3, Layout(tensor=3, sequence_parallel=True), None), "dp2-packed": (2, Layout(), 256)}


@pytest.fixture(scope="module")
def folder():
    return model_folder()


def rollout(folder: Path) -> tuple[Sequences, torch.Tensor]:
    """Two problems, each with its right answer and a wrong one."""
    tokenizer, rows = load_tokenizer(folder), []
    for index, prompt in enumerate(prompts_of(folder, 2)):
        right = TASK.demonstration(TASK.train_problem(index, 0), None)
        for text in (right, "I do not know."):
            rows.append((index, prompt, tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]))
    lengths = torch.tensor([len(prompt) + len(response) for _, prompt, response in rows])
    ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
    for row, (_, prompt, response) in enumerate(rows):
        ids[row, : lengths[row]] = torch.tensor(prompt + response)
    prompt_lengths = torch.tensor([len(prompt) for _, prompt, _ in rows])
    prompt_ids = torch.tensor([index for index, _, _ in rows])
    return Sequences(ids, lengths, prompt_lengths, prompt_ids), torch.tensor([1.0, 0.0, 1.0, 0.0])


def one_update(folder: Path, layout: Layout, mb_tokens: int | None) -> dict[str, Any]:
    """Scores of a step's responses, and what one update by GRPO reports and leaves behind."""
    policy = MegatronPolicy(load_config(folder), SETTINGS, layout=layout, seed=0)
    policy.load_weights(load_weights(folder), keep_reference=False)
    sequences, rewards = rollout(folder)
    passes = dict(micro_batch_size=2, mb_tokens=mb_tokens, temperature=1.0)
    logprobs, entropies = policy.score(sequences, **passes)
    batch = token_batch(sequences, rewards, logprobs)
    objective = build_objective("grpo")
    result = policy.update(objective, objective.prepare(batch), sequences, **passes)
    after, _ = policy.score(sequences, **passes)
    mask = batch.token_mask
    return {
        "logprobs": logprobs[mask], "entropies": entropies[mask], "after": after[mask],
        "loss": result.metrics["loss/total"], "grad_norm": result.grad_norm,
    }  # fmt: skip


@pytest.fixture(scope="module")
def alone(folder):
    return run_ranks(1, one_update, folder, Layout(), None)[0]


def test_scores_equal_transformers(folder, alone):
    sequences, _ = rollout(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    held = torch.arange(sequences.input_ids.shape[1]) < sequences.lengths[:, None]
    with torch.no_grad():
        log_p = model(sequences.input_ids, attention_mask=held).logits[:, :-1].log_softmax(-1)
    chosen = log_p.gather(-1, sequences.input_ids[:, 1:, None])[..., 0]
    mask = token_batch(sequences, torch.zeros(4), chosen).token_mask
    torch.testing.assert_close(alone["logprobs"], chosen[mask], rtol=0, atol=1e-4)
    entropies = -(log_p.exp() * log_p).sum(-1)[mask]
    torch.testing.assert_close(alone["entropies"], entropies, rtol=0, atol=1e-4)
    assert (alone["after"] - alone["logprobs"]).abs().max() > 1e-2  # the update was one


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_updates_alike(folder, alone, name):
    world_size, *rest = LAYOUTS[name]
    assert_alike(run_ranks(world_size, one_update, folder, *rest)[0], alone)


def assert_alike(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in ("logprobs", "entropies", "after"):
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-4, msg=name)
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-4)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


def test_converted_there_and_back_is_bit_equal(folder, tmp_path):
    hf_to_megatron(folder, tmp_path / "megatron")
    megatron_to_hf(tmp_path / "megatron", folder, tmp_path / "hf")
    before, after = load_weights(folder), {}
    for file in (tmp_path / "hf").glob("*.safetensors"):
        after |= load_file(file)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_both_generators_write_the_same(folder):
    request = Request(prompts_of(folder, 8), 1, SamplingParams(24, greedy=True, stop_token_ids=(2,)), seed=0)
    decoder, hf = (generator(folder).generate(request) for generator in (DecoderGenerator, HFGenerator))
    assert torch.equal(decoder.tokens, hf.tokens)
    torch.testing.assert_close(decoder.logprobs, hf.logprobs, rtol=0, atol=1e-4)
