"""vLLM's OpenAI server on an export, in a process of its own."""

import os
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager

from nemo_grpo.engine.launch import free_port

PATIENCE = 240


@contextmanager
def serving(model):
    """The server's address while it runs; its model is called ``policy``."""
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
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.terminate()


def answers(port):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as reply:
            return reply.status == 200
    except OSError:
        return False
