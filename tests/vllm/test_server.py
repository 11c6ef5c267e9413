"""An export behind vLLM's OpenAI server answers as the decoder does."""

import urllib.error

import pytest
from openai_server import post, serving
from taught_policy import greedy

from nemo_grpo.sampling.generate_decoder import DecoderGenerator
from nemo_grpo.sampling.requests import Request

pytestmark = pytest.mark.vllm

LIMIT = 24


@pytest.fixture(scope="module")
def ask(model):
    with serving(model) as address:
        yield lambda path, **content: post(address, path, content)


def test_greedy_completions_are_the_decoders(ask, model, tokenizer, prompts):
    request = Request(prompts[:8], 1, greedy(tokenizer, LIMIT), 0)
    expected = DecoderGenerator(model).generate(request)
    for i, prompt in enumerate(prompts[:8]):
        (choice,) = ask("completions", prompt=prompt, temperature=0, max_tokens=LIMIT)
        text = tokenizer.decode(expected.tokens[i, : expected.lengths[i]], skip_special_tokens=True)
        assert choice["text"] == text
        assert choice["finish_reason"] == ("length" if expected.truncated[i] else "stop")


def test_a_chat_is_put_into_the_exported_template(ask):
    message = [{"role": "user", "content": "12 + 30 = ?"}]
    choices = ask("chat/completions", messages=message, n=3, seed=1, logprobs=True, max_tokens=8)
    assert len(choices) == 3
    assert all(choice["logprobs"]["content"] for choice in choices)
    again = ask("chat/completions", messages=message, n=3, seed=1, logprobs=True, max_tokens=8)
    assert [choice["message"] for choice in again] == [choice["message"] for choice in choices]


def test_a_prompt_beyond_the_context_is_refused(ask, prompts):
    with pytest.raises(urllib.error.HTTPError, match="400"):
        ask("completions", prompt=prompts[0] * 40, max_tokens=4)
