"""Small models whose logits are far from uniform, their generators, and what these must give."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM


def make_model(config: Any, seed: int = 0) -> Any:
    """A model with weights of every kind far from their defaults."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.mul_(5)
        else:
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return model


def make_generator(kind: Any, model: Any, **options: Any) -> Any:
    """A generator of this class with the model's weights."""
    generator = kind(model.config, **options)
    generator.update_weights(model.named_parameters())
    return generator


def full_forward(model: Any, prompt: list[int], response: list[int]) -> torch.Tensor:
    """[len(response), V] logits by one pass of transformers without cache or padding."""
    return model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]


def logprobs_of(model: Any, prompt: list[int], response: list[int], temperature: float = 1.0) -> torch.Tensor:
    """[len(response)] logprobs of the response's tokens by `full_forward`."""
    logprobs = torch.log_softmax(full_forward(model, prompt, response) / temperature, -1)
    return logprobs.gather(1, torch.tensor(response)[:, None])[:, 0]


def greedy_of(model: Any, prompt: list[int], num_tokens: int, stop: Any = None) -> list[int]:
    """What transformers' own ``generate`` gives."""
    options = {"do_sample": False, "max_new_tokens": num_tokens, "pad_token_id": 0, "eos_token_id": stop}
    return model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()


def responses(rollout: Any) -> list[list[int]]:
    """Token ids of every response, without what is behind its end."""
    return [row[:n].tolist() for row, n in zip(rollout.tokens, rollout.lengths, strict=True)]
