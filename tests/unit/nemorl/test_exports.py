"""Exports beside a training when something fails. A stand-in converts; tests/conv has the real converter."""

import os
import shutil
import threading

import pytest

from nemo_grpo.nemorl import checkpoints
from nemo_grpo.nemorl.checkpoints import Exports


class Copied(Exports):
    """Copies the weights; a list of what happens instead, one entry per conversion: an exit code or error."""

    happens: list[int | Exception]

    def _convert(self, links):
        outcome = self.happens.pop(0) if self.happens else 0
        if isinstance(outcome, Exception):
            raise outcome
        if outcome == 0:
            export = self.folder / links.stem
            export.mkdir(parents=True, exist_ok=True)
            (export / "weights").write_text((links / "weights").read_text())
        return outcome


class Manager:
    """Finishes checkpoints as NeMo-RL 0.7.0, and keeps the newest two."""

    def __init__(self, folder):
        self.folder = folder

    def finalize_checkpoint(self, path):
        final = path.with_name(path.name.removeprefix("tmp_"))
        shutil.rmtree(final, ignore_errors=True)
        path.rename(final)
        for old in sorted(self.folder.glob("step_*"), key=lambda path: int(path.name[5:]))[:-2]:
            shutil.rmtree(old)

    def save(self, step, text="weights"):
        path = self.folder / f"tmp_step_{step}"
        path.mkdir(parents=True)
        (path / "weights").write_text(text)
        self.finalize_checkpoint(path)


@pytest.fixture
def manager(tmp_path):
    return Manager(tmp_path / "checkpoints")


@pytest.fixture
def start(tmp_path, manager):
    """Start exports, of which the first end as given."""

    def begun(*happens):
        exports = Copied(tmp_path / "checkpoints", tmp_path / "hf", "bfloat16")
        exports.happens = list(happens)
        manager.__dict__.pop("finalize_checkpoint", None)  # of the start before
        exports.check()
        exports.after_every_save(manager)
        exports.begin()
        return exports

    return begun


def exported(tmp_path):
    return {path.parent.name: path.read_text() for path in (tmp_path / "hf").glob("step_*/weights")}


def test_failed_exports_release_links_and_are_retried_while_the_checkpoint_exists(
    tmp_path, manager, start, caplog
):
    exports = start(*[2] * 6)
    for step in range(1, 7):
        manager.save(step)
    assert not exports.wait()
    assert exports.failed == [f"step_{step}" for step in range(1, 7)]
    assert not list(exports.waiting.iterdir())
    assert sorted(path.name for path in manager.folder.glob("step_*")) == ["step_5", "step_6"]
    assert f"no export {tmp_path}/hf/step_4; NeMo-RL has deleted its checkpoint" in caplog.text
    fifth = f"{manager.folder}/step_5"
    assert f"--megatron-checkpoint {fifth} --hf-config {fifth}/pol" in caplog.text
    assert start().wait()
    assert set(exported(tmp_path)) == {"step_5", "step_6"}


def test_an_error_in_the_thread_is_a_failure_and_ends_no_other_export(tmp_path, manager, start, caplog):
    exports = start(OSError(12, "Cannot allocate memory"))
    for step in (1, 2):
        manager.save(step)
    assert not exports.wait()
    assert exports.failed == ["step_1"]
    assert set(exported(tmp_path)) == {"step_2"}
    assert "Cannot allocate memory" in caplog.text


def test_undeletable_links_are_ignored_and_never_converted(tmp_path, manager, start, monkeypatch, caplog):
    remove = shutil.rmtree

    def busy(path, ignore_errors=False):
        if "step_1." in path.name and not ignore_errors:
            raise OSError(39, "Directory not empty", str(path))
        remove(path, ignore_errors)

    monkeypatch.setattr(checkpoints.shutil, "rmtree", busy)
    exports = start()
    for step in (1, 2):
        manager.save(step)
    assert exports.wait()
    assert set(exported(tmp_path)) == {"step_1", "step_2"}
    assert "stays until the next start" in caplog.text
    (left,) = exports.waiting.iterdir()
    (left / "weights").unlink()
    again = start()
    assert again.wait()
    assert not list(again.waiting.iterdir())
    assert exported(tmp_path)["step_1"] == "weights"


def test_failing_links_stop_neither_training_nor_start(tmp_path, manager, start, monkeypatch, caplog):
    def over_quota(*_arguments, **_options):
        raise OSError(122, "Disk quota exceeded")

    exports = start()
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", over_quota)
        manager.save(1)
        again = Copied(manager.folder, tmp_path / "hf", "bfloat16")
        again.begin()
        assert not again.wait()
    assert not exports.wait()
    assert exports.failed == again.failed == ["step_1"]
    assert "Disk quota exceeded" in caplog.text
    assert not list(exports.waiting.iterdir())
    assert start().wait()
    assert set(exported(tmp_path)) == {"step_1"}


def test_a_step_saved_again_while_its_older_export_runs_is_exported_last(
    tmp_path, manager, start, monkeypatch
):
    runs, is_saved = threading.Event(), threading.Event()
    convert = Copied._convert

    def slow(self, links):
        runs.set()
        assert is_saved.wait(20)
        return convert(self, links)

    monkeypatch.setattr(Copied, "_convert", slow)
    exports = start()
    manager.save(5, "old")
    assert runs.wait(20)
    manager.save(5, "new")
    is_saved.set()
    assert exports.wait()
    assert exported(tmp_path) == {"step_5": "new"}
    assert not list(exports.waiting.iterdir())


def test_failed_export_of_a_step_saved_again_replaces_the_older_export(tmp_path, manager, start):
    exports = start()
    manager.save(5, "old")
    assert exports.wait()
    os.utime(tmp_path / "hf" / "step_5", (1, 1))
    exports = start(2)  # what failed is older than the checkpoint
    assert not exports.wait()
    assert exported(tmp_path) == {"step_5": "old"}
    (manager.folder / "step_5" / "weights").write_text("new")
    assert start().wait()
    assert exported(tmp_path) == {"step_5": "new"}
