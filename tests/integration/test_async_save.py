"""Saving while training goes on: the same checkpoint, complete some steps later; failures are told."""

import os
import threading

import pytest
import torch
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from toy_policies import assert_equal, hf_model, policy_of, train, weights_of

from nemo_grpo.engine.checkpoint_store import WEIGHTS, CheckpointStore
from nemo_grpo.engine.megatron.policy_checkpoint import begin_save, load_policy
from nemo_grpo.engine.saving import Saver, TrainingAborted
from nemo_grpo.run.folder import SIDE_FOLDER
from nemo_grpo.support.errors import UserError


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def policy():
    return policy_of(hf_model())


@pytest.fixture
def gate(monkeypatch):
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
    after = weights_of(policy)
    threading.Timer(0.2, gate.set).start()
    saver.save(2, {})  # waits for the first
    assert saver.store.latest() == tmp_path / "checkpoints/step_000001"
    assert any(not torch.equal(after[name], tensor) for name, tensor in before.items())
    assert (saver.store.latest() / SIDE_FOLDER / "config.json").read_text() == "{}"
    load_policy(policy, saver.store.latest() / WEIGHTS)
    assert_equal(weights_of(policy), before)
    train(policy)  # the optimizer's moments too are of that moment
    assert_equal(weights_of(policy), after)
    saver.finish()
    assert saver.store.latest() == tmp_path / "checkpoints/step_000002"


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
        saver._under_way.write._thread.join()
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
