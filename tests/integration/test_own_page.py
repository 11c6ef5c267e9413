"""docs/own.md, done as it says, with a tiny model as ``model``."""

import sys
from pathlib import Path

import pytest
from processes import ROOT, nemo_grpo, output_of, python
from small_runs import rows
from toy_policies import new_model

sys.path.append(str(ROOT / "tests/contract"))
from test_documents import blocks

PAGE = ROOT / "docs/own.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The page's files and the model, in a folder far from the repository."""
    folder = tmp_path_factory.mktemp("own")
    new_model(
        folder / "model",
        vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=48, max_position_embeddings=512,
    )  # fmt: skip
    for language in ("python", "yaml"):
        for block in blocks(PAGE, language):
            (folder / block.partition("\n")[0].removeprefix("# ")).write_text(block)
    return folder


def run(folder: Path, line: str) -> str:
    """What a command of the page says."""
    name, *arguments = line.split()
    return output_of({"python": python, "nemo-grpo": nemo_grpo}[name](*arguments, cwd=folder))


@pytest.mark.slow
def test_the_page_works_as_it_is_written(folder):
    said = {line: run(folder, line) for block in blocks(PAGE, "bash") for line in block.splitlines()}
    trained = folder / "runs/here"
    assert (trained / "hf/model.safetensors").is_file()
    assert {path.name for path in (trained / "own").iterdir()} == {"my_loss.py", "my_rewards.py"}
    found = rows(trained)
    assert found[-1]["step"] == 20
    assert all(row["reward/not_finite"] == 0 for row in found[1:])
    assert all("reward/my_rewards.py:brevity" in row for row in found[1:])
    assert (folder / "runs/eval-here/summary.json").is_file(), list((folder / "runs").iterdir())
    launched = next(text for line, text in said.items() if "--dry-run" in line)
    assert "train.sbatch" in launched
    assert str(folder / "cluster.yaml") in launched


@pytest.mark.slow
def test_a_finished_run_keeps_the_code_it_was_trained_with(folder):
    before = (folder / "runs/here/own/my_rewards.py").read_text()
    (folder / "my_rewards.py").write_text("def brevity(response): return 0.5\n")
    said = output_of(nemo_grpo("train", "here.yaml", "--resume", cwd=folder))
    assert "nothing is left to train" in said
    assert (folder / "runs/here/own/my_rewards.py").read_text() == before
