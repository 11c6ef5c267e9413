"""Rollout steps drawn for the tests of variants, and what each variant is tested with."""

from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st

from nemo_grpo import TokenBatch
from nemo_grpo.variants.checking.small_steps import random_step

PARAMETERS: dict[str, dict[str, Any]] = {
    "grpo": {"reference_policy_kl_penalty": 0.1},
    "dr_grpo": {"max_response_length": 7},
    "dapo": {},
    "clip_cov": {"covariance_min": 0.05, "covariance_max": 5.0, "clip_fraction": 0.2},
    "cw_grpo": {},
    "tr_grpo": {"reference_policy_kl_penalty": 0.1},
    "erpo": {"num_buckets": 2},
    "gpg": {},
    "gspo": {"ratio_clip_min": 0.05, "ratio_clip_max": 0.1},
    "cispo": {"ratio_clip_min": 0.1, "ratio_clip_max": 0.2, "reference_policy_kl_penalty": 0.1},
    "maxrl": {},
    "dppo": {"divergence_threshold": 0.05, "ratio_max": 1.1, "reference_policy_kl_penalty": 0.1},
    "sapo": {"tau_positive": 1.0, "tau_negative": 3.0},
}
"""One setting per variant under which every part of it acts on small examples."""

FURTHER: list[tuple[str, dict[str, Any]]] = [
    (
        "cw_grpo",
        {"logprob_centering": "group", "scope": "batch", "ratio_clip_min": 0.2, "ratio_clip_max": 0.3},
    ),
    ("tr_grpo", {"weighting": "random", "kl_weighting": "outer"}),
    ("tr_grpo", {"weighting": "reverse", "kl_weighting": "none"}),
    ("gpg", {"reward_normalization": "batch", "aggregation": "sequence_mean"}),
    ("grpo", {"use_leave_one_out_baseline": True, "ratio_clip_c": 3.0, "aggregation": "constant",
              "max_response_length": 9}),
    ("erpo", {"num_buckets": 2, "entropy_statistics": "moving"}),
    ("tr_grpo", {"aggregation": "group_token_mean", "reference_policy_kl_penalty": 0.1}),
    ("gpg", {"aggregation": "group_token_mean", "use_alpha": False}),
    ("gpg", {"reference_policy_kl_penalty": 0.1}),
    ("gspo", {"use_importance_sampling_correction": True}),
    ("cispo", {"aggregation": "group_token_mean"}),
    ("sft", {}),
]  # fmt: skip

ALL = [*PARAMETERS.items(), *FURTHER]
IDS = [name if i < len(PARAMETERS) else f"{name}-{i}" for i, (name, _) in enumerate(ALL)]


@st.composite
def steps(draw: st.DrawFn) -> TokenBatch:
    """2-4 groups of 1-4 responses of 0-6 tokens; some rows excluded, some rewards equal."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=2, max_size=4))
    num_rows = sum(sizes)
    lengths = draw(st.lists(st.integers(0, 6), min_size=num_rows, max_size=num_rows))
    rewards = draw(st.lists(st.sampled_from([0.0, 1.0, 0.3]), min_size=num_rows, max_size=num_rows))
    excluded = draw(st.lists(st.booleans(), min_size=num_rows, max_size=num_rows))
    ids = [5 * group - 3 for group, size in enumerate(sizes) for _ in range(size)]
    batch = random_step(lengths, rewards, ids, draw(st.integers(0, 2**31)))
    return replace(batch, sample_mask=~(torch.tensor(excluded) & (torch.arange(num_rows) % 3 == 2)))
