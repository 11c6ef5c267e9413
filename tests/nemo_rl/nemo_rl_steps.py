"""A made-up rollout step in NeMo-RL's own container, and a toy model that sees one token."""

import torch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict

VOCAB, ROWS, LENGTH, PROMPT = 32, 8, 12, 3
LENGTHS = torch.tensor([5, 12, 7, 9, 6, 11, 8, 10])


def embedding():
    """[V, V]: the logits that follow each token."""
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(5))


def loss_data(**further):
    """What the trainer gives to ``policy.train``: 8 rows of 12 tokens, one of them left out."""
    generator = torch.Generator().manual_seed(1)
    positions = torch.arange(LENGTH)
    is_token = positions < LENGTHS[:, None]
    ids = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator) * is_token

    def near(logprobs, distance):
        return logprobs + distance * torch.randn(ROWS, LENGTH, generator=generator)

    logits = embedding()[ids[:, :-1]].log_softmax(-1)
    scored = torch.nn.functional.pad(logits.gather(-1, ids[:, 1:, None]).squeeze(-1), (1, 0))
    prev = near(scored, 0.1)
    return BatchedDataDict(
        {
            "input_ids": ids,
            "input_lengths": LENGTHS.clone(),
            "token_mask": ((positions >= PROMPT) & is_token).float(),
            "sample_mask": torch.tensor([1.0] * (ROWS - 1) + [0.0]),
            "prev_logprobs": prev,
            "generation_logprobs": near(prev, 0.03),
            "reference_policy_logprobs": near(prev, 0.2),
            "advantages": torch.randn(ROWS, LENGTH, generator=generator),
            **further,
        }
    )


def current_logprobs(data, model=None):
    """[B, S - 1]: the toy model's logprobs. Args: model: in place of `embedding`."""
    logprobs = (embedding() if model is None else model)[data["input_ids"][:, :-1]].log_softmax(-1)
    return logprobs.gather(-1, data["input_ids"][:, 1:, None]).squeeze(-1)


def packed(microbatch, model):
    """The microbatch's logits as one row, and where its sequences begin."""
    lengths = microbatch["input_lengths"]
    ids = torch.cat([row[:n] for row, n in zip(microbatch["input_ids"], lengths.tolist(), strict=True)])
    return model[ids][None], torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def counts(data):
    """The denominators that a worker hands to the loss."""
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    return {"global_valid_seqs": data["sample_mask"].sum(), "global_valid_toks": mask.sum()}
