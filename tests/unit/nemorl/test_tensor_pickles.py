"""Tensors that the driver sends can be read where there is no Megatron."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

MEGATRON = """
import io, torch
__version__ = "0.19.2"
def safe_load_from_bytes(b):
    return torch.load(io.BytesIO(b), weights_only=True)
torch.storage._load_from_bytes = safe_load_from_bytes
"""
"""What importing megatron.core 0.19.2 does, as far as it matters here; 0.16.1 does not."""

PROCESSES = """
import os, pickle, sys, torch
from nemo_grpo.nemorl.workarounds.tensor_pickles import keep_tensor_pickles_plain

def worker(sent):
    import megatron.core
    with open(sent, "wb") as file:
        pickle.dump(torch.ones(2), file)

def driver(sent, answered, keeps):
    if keeps:
        keep_tensor_pickles_plain()
    with open(sent, "rb") as file:
        received = pickle.load(file)
    assert "megatron.core" in sys.modules
    with open(answered, "wb") as file:
        pickle.dump(received + 1, file)

sent, plain, asking = sys.argv[1:]
for function, *arguments in ((worker, sent), (driver, sent, plain, True), (driver, sent, asking, False)):
    if not (child := os.fork()):
        function(*arguments)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""
"""Each in a process of its own."""


def test_driver_tensors_need_no_megatron_after_reading_a_workers_tensor(tmp_path):
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text(MEGATRON)
    (core.parent / "__init__.py").write_text("")
    paths = os.pathsep.join((str(tmp_path), str(Path(__file__).parents[3])))
    sent, plain, asking = files = [tmp_path / name for name in ("sent", "plain", "asking")]
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROCESSES, *map(str, files)],
        env=os.environ | {"PYTHONPATH": paths},
        check=True,
    )
    assert b"megatron" in sent.read_bytes()
    assert b"megatron" in asking.read_bytes()
    assert b"megatron" not in plain.read_bytes()
    assert pickle.loads(plain.read_bytes()).tolist() == [2.0, 2.0]
