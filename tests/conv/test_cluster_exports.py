"""`export.at_every_save`: checkpoints laid out as NeMo-RL's, converted beside a training."""

import json
import os
import re
import shlex
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from conv_models import assert_same_tensors, names_in, save_adapters, tensors_of
from conv_ranks import on_ranks, parameters_from_checkpoint, save_after_a_step
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from typer.testing import CliRunner

from checkpoints_conv.formats.model_folder import hf_config
from nemo_grpo.cli.convert import app
from nemo_grpo.errors import UserError
from nemo_grpo.families import family_for
from nemo_grpo.nemorl.checkpoints import Exports, save_side_files


class Manager:
    """What the trainers call of NeMo-RL 0.7.0's `CheckpointManager`; keeps the newest checkpoint alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def init_tmp_checkpoint(self, step):
        path = self.folder / f"tmp_step_{step}"
        path.mkdir(parents=True)
        (path / "training_info.json").write_text(json.dumps({"total_steps": step}))
        return path

    def finalize_checkpoint(self, path):
        path.rename(path.with_name(f"step_{path.name.split('_')[2]}"))
        for old in sorted(self.folder.glob("step_*"))[:-1]:
            shutil.rmtree(old)


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


@pytest.fixture
def training(tmp_path, hf_models, weights):
    """(save a step, its exports): a run's checkpoints with our side files."""
    manager, exports = Manager(tmp_path / "checkpoints"), exports_in(tmp_path)
    exports.after_every_save(manager)
    save_side_files(manager, Tokenizer(), AutoConfig.from_pretrained(hf_models("qwen2")))

    def save(step):
        path = manager.init_tmp_checkpoint(step)
        shutil.copytree(weights, path / "policy" / "weights")
        manager.finalize_checkpoint(path)

    return save, exports


def exports_in(folder: Path, lora_base: Path | None = None) -> Exports:
    return Exports(folder / "checkpoints", folder / "hf", "float32", lora_base)


def links_of(exports: Exports, step: int) -> Path:
    (found,) = exports.waiting.glob(f"step_{step}.*")
    return found


def test_every_save_becomes_a_model_though_its_checkpoint_is_deleted(tmp_path, training, weights, hf_models):
    save, exports = training
    exports.check()
    save(1)
    save(2)
    saved = exports.checkpoint_dir
    assert [path.name for path in saved.glob("step_*")] == ["step_2"], "deleted before its export"
    exports.begin()
    assert exports.wait(), (tmp_path / "hf" / "step_1.log").read_text()
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "hf" / "step_1", dtype=torch.float32)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf" / "step_2").config.vocab_size == 96
    folder = hf_models("qwen2")
    checkpoint = weights / "iter_0000000"
    oracle = on_ranks(1, parameters_from_checkpoint, folder, checkpoint)
    expected = dict(family_for(hf_config(folder)).to_hf(oracle))
    assert_same_tensors(trained.state_dict(), expected)
    assert (tmp_path / "hf" / "step_1" / "tokenizer_config.json").is_file()
    assert GenerationConfig.from_pretrained(tmp_path / "hf" / "step_1").to_dict() == (
        GenerationConfig.from_pretrained(folder).to_dict()
    )
    assert "| step | 1 |" in (tmp_path / "hf" / "step_1" / "README.md").read_text()
    assert not list(exports.waiting.iterdir()), "the second names are gone"
    assert (saved / "step_2" / "policy" / "weights" / "iter_0000000" / ".metadata").is_file()


def test_adapters_are_merged_into_their_base(tmp_path, hf_models):
    torch.manual_seed(0)
    adapters = {"self_attention.linear_proj": (torch.randn(4, 3, 32), torch.randn(4, 32, 3))}
    base = hf_models("qwen2")
    saved = save_adapters(adapters, tmp_path / "saved", 3, 6)
    manager, exports = Manager(tmp_path / "checkpoints"), exports_in(tmp_path, base)
    exports.after_every_save(manager)
    save_side_files(manager, Tokenizer(), AutoConfig.from_pretrained(base))
    path = manager.init_tmp_checkpoint(1)
    shutil.copytree(saved, path / "policy" / "weights")
    manager.finalize_checkpoint(path)
    exports.begin()
    assert exports.wait(), (tmp_path / "hf" / "step_1.log").read_text()
    found, before = tensors_of(tmp_path / "hf" / "step_1"), tensors_of(base)
    name = "model.layers.2.self_attn.o_proj.weight"
    a, b = (part[2] for part in adapters["self_attention.linear_proj"])
    torch.testing.assert_close(found[name], before[name].float() + 6 / 3 * b @ a)
    other = "model.layers.2.mlp.up_proj.weight"
    assert torch.equal(found[other], before[other].float())


def test_the_next_start_converts_what_a_run_has_left(tmp_path, training):
    save, killed = training
    save(1)
    half = tmp_path / "hf" / ".step_1.partial"  # the converter was killed, too
    half.mkdir(parents=True)
    (half / "journal.jsonl").write_text('{"direction": "')
    (killed.checkpoint_dir / "tmp_step_2").mkdir()  # never finished: no checkpoint
    save(3)
    shutil.rmtree(links_of(killed, 3))  # killed between NeMo-RL's renaming and ours
    again = exports_in(tmp_path)
    again.begin()
    assert again.wait(), (tmp_path / "hf" / "step_1.log").read_text()
    assert [name for name in names_in(tmp_path / "hf") if ".log" not in name] == ["step_1", "step_3"]
    third = exports_in(tmp_path)
    before = (tmp_path / "hf" / "step_3").stat().st_mtime_ns
    third.begin()
    assert third.wait()
    assert (tmp_path / "hf" / "step_3").stat().st_mtime_ns == before, "made once"


def test_a_failed_export_is_reported_and_tried_again(tmp_path, training, caplog):
    save, exports = training
    save(1)
    (links_of(exports, 1) / "policy" / "tokenizer" / "config.json").unlink()
    exports.begin()
    assert not exports.wait()
    assert "export of" in caplog.text
    assert not list(exports.waiting.iterdir()), "nothing is held for it"
    (command,) = re.findall(r"the next start tries again, or: nemo-grpo convert (.*)", caplog.text)
    assert CliRunner().invoke(app, shlex.split(command)).exit_code == 0
    assert AutoConfig.from_pretrained(tmp_path / "hf" / "step_1").vocab_size == 96
    shutil.rmtree(tmp_path / "hf" / "step_1")
    again = exports_in(tmp_path)
    again.begin()
    assert again.wait()
    assert (tmp_path / "hf" / "step_1").is_dir()


def test_a_stop_does_not_wait(tmp_path, training, monkeypatch):
    save, exports = training
    save(1)
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 600\n")
    slow.chmod(0o755)
    monkeypatch.setattr("nemo_grpo.nemorl.checkpoints.sys.executable", str(slow))
    exports.begin()
    while exports._process is None:
        time.sleep(0.01)
    exports.stop()
    assert exports._process.poll() == -signal.SIGTERM
    assert links_of(exports, 1).is_dir(), "for the next start"


def test_a_file_system_without_hard_links_is_refused(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(UserError, match=r"at_every_save=true: no hard links .* set it to false"):
        exports_in(tmp_path).check()
    assert not list((tmp_path / "checkpoints" / ".exports").iterdir())
