"""NeMo-RL's checkpoints with the side files that the driver adds, converted by `nemo-grpo convert`."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conv_models import assert_same_tensors
from conv_ranks import on_ranks, parameters_from_checkpoint, save_after_a_step
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from typer.testing import CliRunner

from nemo_grpo.cli.convert import app
from nemo_grpo.models import family_for
from nemo_grpo.nemorl.callbacks import calling_back
from nemo_grpo.nemorl.checkpoints import SIDE_FOLDER, SideFiles
from nemo_grpo.support.model_folder import hf_config


class Manager:
    """What the trainers call of NeMo-RL 0.7.0's `CheckpointManager`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def init_tmp_checkpoint(self, step):
        path = self.folder / f"tmp_step_{step}"
        path.mkdir(parents=True)
        (path / "training_info.json").write_text(json.dumps({"total_steps": step}))
        return path

    def finalize_checkpoint(self, path):
        return path.rename(path.with_name(path.name.removeprefix("tmp_")))


class Tokenizer:
    """Has something to save."""

    def save_pretrained(self, folder):
        (folder / "tokenizer_config.json").write_text("{}")


@pytest.fixture(scope="module")
def weights(hf_models, tmp_path_factory):
    """What megatron-core saves at TP 2, optimizer included: the folder above iter_0000000."""
    folder = tmp_path_factory.mktemp("saved")
    checkpoint = folder / "weights" / "iter_0000000"
    checkpoint.mkdir(parents=True)
    on_ranks(2, save_after_a_step, hf_models("qwen2"), checkpoint, 2, 1)
    (folder / "weights" / "latest_checkpointed_iteration.txt").write_text("0")
    return folder / "weights"


def saved(folder: Path, weights: Path, model: Path) -> Path:
    """A checkpoint of NeMo-RL's with these weights and our side files of the model."""
    manager = Manager(folder / "checkpoints")
    files = SideFiles(Tokenizer(), AutoConfig.from_pretrained(model))
    with calling_back([files], checkpointer=manager):
        path = manager.init_tmp_checkpoint(1)
    shutil.copytree(weights, path / "policy" / "weights")
    return manager.finalize_checkpoint(path)


def converted(checkpoint: Path, output: Path, *options: str) -> Path:
    """Written by the command that the pages give."""
    arguments = ["megatron-to-hf", "--megatron-checkpoint", checkpoint, "--output", output]
    arguments += ["--hf-config", checkpoint / SIDE_FOLDER, "--dtype", "float32", *options]
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == 0, result.output
    return output


def test_a_checkpoint_becomes_its_model_with_tokenizer_and_card(tmp_path, weights, hf_models):
    folder = hf_models("qwen2")
    hf = converted(saved(tmp_path, weights, folder), tmp_path / "hf")
    trained = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32)
    oracle = on_ranks(1, parameters_from_checkpoint, folder, weights / "iter_0000000")
    assert_same_tensors(trained.state_dict(), dict(family_for(hf_config(folder)).to_hf(oracle)))
    assert (hf / "tokenizer_config.json").is_file()
    theirs = GenerationConfig.from_pretrained(folder).to_dict()
    assert GenerationConfig.from_pretrained(hf).to_dict() == theirs
    assert "| step | 1 |" in (hf / "README.md").read_text()
