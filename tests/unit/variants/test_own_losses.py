"""The losses of docs/own.md pass `nemo-grpo variants check`."""

import sys
from pathlib import Path

import pytest

from nemo_grpo.variants import parse_loss_fn
from nemo_grpo.variants.checking import check_variant

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "tests/contract"))
from test_documents import blocks  # noqa: E402


@pytest.mark.parametrize(
    "name", ["my_loss.py:Lenient", "my_losses.py:HalfWay", "my_losses.py:Soft", "my_losses.py:Detached"]
)
def test_a_loss_of_the_page_passes_every_check(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = name.partition(":")[0]
    (text,) = (block for block in blocks(ROOT / "docs/own.md", "python") if block.startswith(f"# {file}\n"))
    Path(file).write_text(text)
    assert check_variant(parse_loss_fn({"variant": name}), quick=True) == []
