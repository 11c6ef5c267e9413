"""A conversation with a retriever, sampled by the real vLLM: turn by turn the decoder's."""

import pytest
import torch
from taught_policy import greedy, taught, vllm_of

from nemo_grpo.recipe import load_recipe
from nemo_grpo.sampling.episodes import sample_responses
from nemo_grpo.sampling.generate_decoder import DecoderGenerator
from nemo_grpo.sampling.requests import Request
from nemo_grpo.support.hf_folder import load_tokenizer
from nemo_grpo.tasks import encode_prompt

pytestmark = pytest.mark.vllm


def test_greedy_conversations_are_the_decoders(tmp_path):
    own = load_recipe("quickstart_search_qa").nemo_grpo
    task = own.task.build()
    sizes = load_recipe("quickstart_search_qa-sft").nemo_grpo.new_model
    model = taught(sizes, task, own.prompt, tmp_path, num_steps=230, batch_size=64)
    tokenizer = load_tokenizer(model)
    prompts = [encode_prompt(tokenizer, own.prompt, problem) for problem in task.validation_problems(32)]
    generators = vllm_of(model, max_model_len=256), DecoderGenerator(model)
    found, expected = (
        sample_responses(generator, tokenizer, task, Request(prompts, 1, greedy(tokenizer, 96), 3))
        for generator in generators
    )
    assert sum(not sample.token_mask.all() for sample in expected) >= 8  # passages were read
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.text == theirs.text
        assert torch.equal(ours.tokens, theirs.tokens)
        assert torch.equal(ours.token_mask, theirs.token_mask)
        torch.testing.assert_close(ours.logprobs, theirs.logprobs, rtol=0, atol=1e-5)
