"""Saving while training goes on: the same checkpoint, complete some steps later; failures are told."""

import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from toy_policies import assert_equal, hf_model, policy_of, train, weights_of

from nemo_grpo.engine.checkpoint_store import TOKENIZER, WEIGHTS, CheckpointStore
from nemo_grpo.engine.megatron.policy import MegatronPolicy
from nemo_grpo.engine.megatron.policy_checkpoint import begin_save, load_policy
from nemo_grpo.engine.saving import Saver, TrainingAborted
from nemo_grpo.support.errors import UserError


@pytest.fixture
def source(tmp_path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def policy() -> MegatronPolicy:
    return policy_of(hf_model())


@pytest.fixture
def gate(monkeypatch) -> threading.Event:
    """The writer waits for it."""
    event, write = threading.Event(), FileSystemWriterAsync.write_preloaded_data

    def waiting(*arguments, **settings):
        assert event.wait(60)
        return write(*arguments, **settings)

    monkeypatch.setattr(FileSystemWriterAsync, "write_preloaded_data", staticmethod(waiting))
    return event


def test_a_save_behind_training_is_the_moment_it_was_asked_for(tmp_path, source, policy, gate):
    saver = Saver(CheckpointStore(tmp_path / "checkpoints"), policy, source, asynchronous=True)
    train(policy)
    before = weights_of(policy)
    saver.save(1, {})
    train(policy)
    saver.finish_if_written()
    assert saver.store.latest() is None  # not a checkpoint yet, and training went on
    assert (tmp_path / "checkpoints/tmp_step_000001").exists()
    gate.set()
    saver.finish()
    assert saver.store.latest() == tmp_path / "checkpoints/step_000001"
    after = weights_of(policy)
    assert any(not torch.equal(after[name], tensor) for name, tensor in before.items())
    assert (saver.store.latest() / TOKENIZER / "config.json").read_text() == "{}"
    load_policy(policy, saver.store.latest() / WEIGHTS)
    assert_equal(weights_of(policy), before)
    train(policy)  # the optimizer's moments too are of that moment
    assert_equal(weights_of(policy), after)


def test_a_second_save_waits_for_the_first(tmp_path, source, policy, gate):
    saver = Saver(CheckpointStore(tmp_path / "checkpoints"), policy, source, asynchronous=True)
    saver.save(1, {})
    threading.Timer(0.2, gate.set).start()
    saver.save(2, {})
    assert saver.store.latest() == tmp_path / "checkpoints/step_000001"
    saver.finish()
    assert saver.store.latest() == tmp_path / "checkpoints/step_000002"


def test_a_save_killed_before_it_is_named_is_the_newest(tmp_path, source, policy, monkeypatch):
    saver = Saver(CheckpointStore(tmp_path / "checkpoints"), policy, source)
    saver.save(999_999, {})

    def killed(path, name):
        if name == "step_1000000":
            raise KeyboardInterrupt

    monkeypatch.setattr("nemo_grpo.engine.checkpoint_store.write_atomically", killed)
    with pytest.raises(KeyboardInterrupt):
        saver.save(1_000_000, {})
    monkeypatch.undo()
    pointer, store = tmp_path / "checkpoints/latest", CheckpointStore(tmp_path / "checkpoints")
    shutil.copytree(store.folder / "step_999999", store.folder / "step_2000000.copy")  # somebody's
    assert pointer.read_text() == "step_999999"
    assert store.latest() == tmp_path / "checkpoints/step_1000000"
    store.remove_leftovers()  # as the next start does
    assert pointer.read_text() == "step_1000000"


def test_a_rank_flushes_what_it_has_written(tmp_path, policy, monkeypatch):
    """The first rank, which flushes the whole folder before it gets its name, may be on another node."""
    flushed, fsync = [], os.fsync

    def noted(descriptor):
        flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr("os.fsync", noted)
    begin_save(policy, tmp_path / "weights", 1).finish()
    written = {str(file) for file in (tmp_path / "weights").rglob("*.distcp")}
    assert written
    assert written <= set(flushed)


@pytest.mark.parametrize("behind", [True, False])
def test_a_failure_of_the_writer_is_raised_and_leaves_no_checkpoint(
    tmp_path, source, policy, monkeypatch, behind
):
    saver = Saver(CheckpointStore(tmp_path / "checkpoints"), policy, source, behind)

    def full(*_arguments):
        raise OSError("no space left on device")

    def save_and_go_on():
        saver.save(1, {})
        saver._under_way[2]._thread.join()
        saver.finish_if_written()

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(TrainingAborted, match=r"step 1 cannot be written.*no space left.* GB are free"):
        save_and_go_on()
    monkeypatch.undo()
    assert saver.store.latest() is None
    saver.save(2, {})
    saver.finish()
    assert saver.store.latest() == tmp_path / "checkpoints/step_000002"


def test_a_save_that_cannot_be_read_back_is_refused_and_leaves_no_checkpoint(
    tmp_path, source, policy, monkeypatch
):
    saver = Saver(CheckpointStore(tmp_path / "checkpoints"), policy, source)
    saver.save(1, {})

    def of_another_torch(*_arguments):
        raise TypeError("empty() got an unexpected keyword argument 'strides'")

    monkeypatch.setattr(TorchDistLoadShardedStrategy, "load_sharded_metadata", of_another_torch)
    with pytest.raises(UserError, match=r"cannot be read back.* torch .* and megatron-core .* 'strides'"):
        saver.save(2, {})
    monkeypatch.undo()
    assert saver.store.latest() == tmp_path / "checkpoints/step_000001"
