"""A policy that has seen demonstrations, made without megatron-core, which is not beside vLLM; vLLM on it."""

from itertools import count

import torch

from nemo_grpo.engine.new_model import build_model
from nemo_grpo.engine.task_tokenizer import build_tokenizer
from nemo_grpo.recipe.own import NewModel
from nemo_grpo.rehearsal.model import Encoder, pretrain
from nemo_grpo.run.demonstrations import demonstrated
from nemo_grpo.sampling.generate_vllm import VLLMGenerator
from nemo_grpo.sampling.requests import SamplingParams
from nemo_grpo.tasks.base import stream

NUM_STEPS = 40
BATCH_SIZE = 16
SMALL = NewModel(
    vocab_size=300, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    intermediate_size=96, max_position_embeddings=512, seed=0,
)  # fmt: skip
"""Heads of 32, the least that vLLM takes on a CPU."""


def taught(config, task, prompt, folder, num_steps=NUM_STEPS, batch_size=BATCH_SIZE):
    tokenizer = build_tokenizer(task, config.vocab_size, config.seed)
    policy = build_model(config, tokenizer)
    limit, key = config.max_position_embeddings, "max_position_embeddings"
    demonstrations = (
        demonstrated(
            tokenizer, task, prompt, task.train_problem(i, 1), stream("lesson", i), limit=limit, key=key
        )
        for i in count()
    )
    pretrain(policy, demonstrations, Encoder(tokenizer, prompt), num_steps, batch_size)
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def greedy(tokenizer, max_tokens):
    return SamplingParams(max_tokens, greedy=True, stop_token_ids=(tokenizer.eos_token_id,))


def vllm_of(folder, max_model_len=128, cache_bytes=64 << 20):
    return VLLMGenerator(folder, "float32", max_model_len=max_model_len, cache_bytes=cache_bytes)


def rows(rollout):
    return [tokens[:n].tolist() for tokens, n in zip(rollout.tokens, rollout.lengths.tolist(), strict=True)]


def assert_same(found, expected, atol, rtol=0.0):
    """The same tokens and, within the tolerances, the same logprobs."""
    assert rows(found) == rows(expected)
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=rtol, atol=atol)
