"""Everything here needs a CUDA device; without one each test says so and is skipped."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="torch finds no CUDA device"))


@pytest.fixture
def on_cpu(tmp_path):
    """Calls a function of test_policy_gpu in a process without GPU; megatron-core would use one it sees."""

    def call(name, *arguments):
        asked, answer = tmp_path / "asked", tmp_path / "answer"
        asked.write_bytes(pickle.dumps(arguments))
        code = (
            "import pickle, sys, test_policy_gpu as t; asked, answer = sys.argv[1:]; "
            f"pickle.dump(t.{name}(*pickle.load(open(asked, 'rb'))), open(answer, 'wb'))"
        )
        parts = [*(str(ROOT / part) for part in ("", "tests", "tests/gpu")), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(parts)}
        subprocess.run([sys.executable, "-c", code, str(asked), str(answer)], check=True, env=environment)
        return pickle.loads(answer.read_bytes())

    return call
