"""Tensors that the driver sends can be read where there is no Megatron."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

MEGATRON = """
import io, torch
__version__ = "0.19.2"
def safe_load_from_bytes(b):
    return torch.load(io.BytesIO(b), weights_only=True)
torch.storage._load_from_bytes = safe_load_from_bytes
"""
"""What importing megatron.core 0.19.2 does, as far as it matters here; 0.16.1 does not."""

WORKER = "import megatron.core, torch, pickle, sys; pickle.dump(torch.ones(2), open(sys.argv[1], 'wb'))"
DRIVER = """
import pickle, sys, torch
from nemo_grpo.nemorl import compat
{keep}
received = pickle.load(open(sys.argv[1], "rb"))
assert "megatron.core" in sys.modules
pickle.dump(received + 1, open(sys.argv[2], "wb"))
"""


@pytest.mark.parametrize(
    ("keep", "asks_for_megatron"), [("compat.keep_tensor_pickles_plain()", False), ("", True)]
)
def test_driver_tensors_need_no_megatron_after_reading_a_workers_tensor(keep, asks_for_megatron, tmp_path):
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text(MEGATRON)
    (core.parent / "__init__.py").write_text("")
    paths = os.pathsep.join((str(tmp_path), str(Path(__file__).parents[3])))
    sent, answered = tmp_path / "sent", tmp_path / "answered"
    for code in (WORKER, DRIVER.format(keep=keep)):
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code, str(sent), str(answered)],
            env=os.environ | {"PYTHONPATH": paths},
            check=True,
        )
    assert b"megatron" in sent.read_bytes()
    assert (b"megatron" in answered.read_bytes()) == asks_for_megatron
    if not asks_for_megatron:
        assert pickle.loads(answered.read_bytes()).tolist() == [2.0, 2.0]
