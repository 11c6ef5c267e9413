"""The stand-in sampler's nucleus and top-k; in a process of its own, because its package is called vllm."""

import json
import subprocess
import sys
from math import log
from pathlib import Path

import pytest

import nemo_grpo.rehearsal

SAMPLER = Path(nemo_grpo.rehearsal.__file__).parent / "sampler"
PROGRAM = """
import json, sys, torch, vllm
cases, *logits = json.loads(sys.argv[1])
kept = [vllm.filtered(torch.tensor(logits), vllm.SamplingParams(**given)) for given in cases]
print(json.dumps([one.log_softmax(-1).exp()[0].tolist() for one in kept]))
"""
CASES = [
    ({}, [0.1, 0.4, 0.2, 0.3]),
    ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
    ({"top_p": 0.6}, [0, 4 / 7, 0, 3 / 7]),  # 0.4 is less, 0.7 is enough
    ({"top_p": 0.3}, [0, 1, 0, 0]),  # the likeliest stays
    ({"top_p": 0.5, "top_k": 3}, [0, 4 / 7, 0, 3 / 7]),  # of 4/9, 3/9, 2/9
    ({"top_p": 0.5, "top_k": 2}, [0, 1, 0, 0]),  # of 4/7 and 3/7
    ({"top_k": -1, "top_p": 1.0}, [0.1, 0.4, 0.2, 0.3]),
]


def test_tokens_outside_top_k_and_of_those_outside_the_nucleus_are_cut():
    logits = [log(p) for p in (0.1, 0.4, 0.2, 0.3)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([[given for given, _ in CASES], logits])],
        env={"PYTHONPATH": str(SAMPLER), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    for (given, expected), found in zip(CASES, json.loads(done.stdout), strict=True):
        assert found == pytest.approx(expected, abs=1e-6), given
