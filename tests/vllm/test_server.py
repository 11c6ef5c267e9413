"""An export behind vLLM's OpenAI server answers as the decoder does."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from nemo_grpo.ports import free_port
from nemo_grpo.sampling.generate_decoder import DecoderGenerator
from nemo_grpo.sampling.requests import Request, SamplingParams

pytestmark = pytest.mark.vllm

PATIENCE = 240
LIMIT = 24


@pytest.fixture(scope="module")
def ask(model):
    port = free_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", port,
        "--model", model, "--served-model-name", "policy", "--dtype", "float32", "--enforce-eager",
        "--max-model-len", "128", "--kv-cache-memory-bytes", 64 << 20, "--no-enable-chunked-prefill",
    ]  # fmt: skip
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    with subprocess.Popen([*map(str, command)], env=environment) as server:
        try:
            end = time.monotonic() + PATIENCE
            while not answers(port):
                assert server.poll() is None
                assert time.monotonic() < end
                time.sleep(0.5)
            yield lambda path, **content: post(port, path, content)
        finally:
            server.terminate()


def answers(port):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as reply:
            return reply.status == 200
    except OSError:
        return False


def post(port, path, content):
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/{path}",
        json.dumps({"model": "policy", **content}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)["choices"]


def test_greedy_completions_are_the_decoders(ask, model, tokenizer, prompts):
    greedy = SamplingParams(LIMIT, greedy=True, stop_token_ids=(tokenizer.eos_token_id,))
    expected = DecoderGenerator(model).generate(Request(prompts[:8], 1, greedy, 0))
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
