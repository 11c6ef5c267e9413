"""Interruptions and full disks."""

import errno
import os
import shutil
import signal
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conv_models import assert_same_tensors, names_in, rewrite, tensors_of

from checkpoints_conv.formats.safetensors_writer import TensorWriter
from checkpoints_conv.formats.torch_dist import TorchDistReader
from checkpoints_conv.formats.torch_dist_writer import TorchDistWriter
from checkpoints_conv.hf_to_megatron import hf_to_megatron
from checkpoints_conv.job import Job
from checkpoints_conv.megatron_to_hf import megatron_to_hf
from checkpoints_conv.verify import verify
from nemo_grpo import UserError


@pytest.fixture(params=["hf-to-megatron", "megatron-to-hf"])
def direction(request, source, checkpoint):
    """A converter as a function of output and options, the class that writes, and a check of the result."""

    def check_megatron(output):
        assert not verify(source, output).different

    def check_hf(output):
        assert_same_tensors(tensors_of(output), tensors_of(source))

    if request.param == "hf-to-megatron":
        return partial(hf_to_megatron, source), TorchDistWriter, check_megatron
    return partial(megatron_to_hf, checkpoint, source), TensorWriter, check_hf


def fail_after(monkeypatch, writer, num_writes, action):
    """Make a writer do ``action`` instead of its write number ``num_writes``; count all writes."""
    original, count = writer.write, [0]

    def write(self, *args):
        count[0] += 1
        if count[0] == num_writes:
            action()
        return original(self, *args)

    monkeypatch.setattr(writer, "write", write)
    return count


INTERRUPTED = threading.Event()


def interrupt(*_):
    INTERRUPTED.set()
    raise KeyboardInterrupt


def forked(function):
    """Run in a child. Returns: its exit code, negative for a signal."""
    child = os.fork()
    if child == 0:
        code = 1
        signal.signal(signal.SIGINT, interrupt)  # a background shell starts us ignoring it
        try:
            function()
            code = 0
        except KeyboardInterrupt:
            code = 130
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)], ids=["kill -9", "ctrl-c"]
)
def test_interrupted_conversion_leaves_no_output_and_resumes(direction, number, code, tmp_path, monkeypatch):
    convert, writer, check = direction

    def interrupt():
        os.kill(os.getpid(), number)
        INTERRUPTED.wait(60)
        time.sleep(0.5)  # until the main thread has stopped the others

    fail_after(monkeypatch, writer, 20, interrupt)
    assert forked(lambda: convert(tmp_path / "out", num_workers=1)) == code
    monkeypatch.undo()
    assert names_in(tmp_path) == [".out.partial"]
    with pytest.raises(UserError, match=r"unfinished conversion; finish it with --resume or start over"):
        convert(tmp_path / "out")
    with pytest.raises(UserError, match="dtype changed since the first attempt"):
        convert(tmp_path / "out", resume=True, dtype=torch.bfloat16)
    count = fail_after(monkeypatch, writer, -1, None)
    convert(tmp_path / "out", resume=True)
    num_resumed, count[0] = count[0], 0
    check(tmp_path / "out")
    assert names_in(tmp_path) == ["out"]
    convert(tmp_path / "whole")
    assert 15 <= count[0] - num_resumed <= 22  # what was done before (19 writes, the rest of a unit) was kept


def test_a_refused_source_leaves_nothing_to_resume(source, checkpoint, tmp_path, caplog):
    """The repaired source is another one, so what was done of the damaged one cannot be used."""
    folder = shutil.copytree(checkpoint, tmp_path / "copy")
    reader = TorchDistReader(folder)
    chunks = [c for key in reader.weights.values() for c in key.chunks]
    last = max((c for c in chunks if c.length > 4096), key=lambda c: (c.file, c.start))
    reader.close()
    file = folder / "iter_0000000" / last.file
    good = file.read_bytes()
    damaged = bytearray(good)
    damaged[last.start + last.length // 2] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(UserError, match="does not match its checksum"):
        megatron_to_hf(folder, source, tmp_path / "out", num_workers=1)
    assert "--resume" not in caplog.text
    assert names_in(tmp_path) == ["copy"]
    file.write_bytes(good)
    megatron_to_hf(folder, source, tmp_path / "out")


def test_a_diverged_checkpoint_is_not_told_to_go_on(source, tmp_path, caplog):
    """The last tensor holds NaN, when most of the export is on the disk."""
    model = shutil.copytree(source, tmp_path / "model")
    last = "model.layers.3.mlp.down_proj.weight"
    rewrite(model, lambda tensors: tensors[last].view(-1)[-1:].fill_(torch.nan))
    megatron = hf_to_megatron(model, tmp_path / "megatron", num_workers=1)
    with pytest.raises(
        UserError, match=r"down_proj.weight holds NaN or inf: .* export an earlier checkpoint"
    ):
        megatron_to_hf(megatron, source, tmp_path / "out", num_workers=1)
    assert "--resume" not in caplog.text
    assert names_in(tmp_path) == ["megatron", "model"]


@pytest.fixture
def refused_at_the_end(source, tmp_path, monkeypatch):
    """A conversion that is complete but for its name, because its output appeared meanwhile."""
    finish = Job.finish

    def finish_after_the_output_appeared(self, sha256=False):
        self.output.mkdir()
        finish(self, sha256)

    with monkeypatch.context() as patch:
        patch.setattr(Job, "finish", finish_after_the_output_appeared)
        with pytest.raises(UserError, match="exists; choose another name"):
            hf_to_megatron(source, tmp_path / "out")
    (tmp_path / "out").rmdir()


@pytest.mark.usefixtures("refused_at_the_end")
def test_a_conversion_whose_output_appears_meanwhile_can_be_resumed(source, tmp_path, caplog):
    """The place is refused, not the source."""
    messages = [record.getMessage() for record in caplog.get_records("setup")]
    assert any("go on with --resume" in message for message in messages)
    assert verify(source, hf_to_megatron(source, tmp_path / "out", resume=True)).different == {}


@pytest.mark.usefixtures("refused_at_the_end")
def test_a_conversion_without_space_can_be_resumed(source, tmp_path, monkeypatch):
    """The place is refused, not the source."""
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=-1))
        with pytest.raises(UserError, match="free some or choose another folder"):
            hf_to_megatron(source, tmp_path / "out", resume=True)
    assert verify(source, hf_to_megatron(source, tmp_path / "out", resume=True)).different == {}


def test_a_unit_that_was_torn_between_its_names_is_written_once(hf_models, tmp_path, monkeypatch):
    """An expert layer's norm is stored under two names; the kill comes behind the first."""
    record = Job.record

    def torn(self, entry):
        record(self, entry)
        if entry["key"].endswith("mlp.linear_fc1.layer_norm_weight") and entry["chunk"]["offsets"][0] == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    source = hf_models("qwen3-moe")
    with monkeypatch.context() as patch:
        patch.setattr(Job, "record", torn)
        assert forked(lambda: hf_to_megatron(source, tmp_path / "out", num_workers=1)) == -signal.SIGKILL
    found = TorchDistReader(hf_to_megatron(source, tmp_path / "out", num_workers=1, resume=True))
    whole = TorchDistReader(hf_to_megatron(source, tmp_path / "whole", num_workers=1))
    for name, key in whole.keys.items():
        assert sorted(c.offsets for c in found.keys[name].chunks) == sorted(c.offsets for c in key.chunks)
    found.close()
    whole.close()


def test_damaged_progress_is_repeated(direction, tmp_path, monkeypatch):
    """What the journal says is done is checked before it is kept, and a torn journal line is ignored."""
    convert, writer, check = direction
    fail_after(monkeypatch, writer, 20, lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert forked(lambda: convert(tmp_path / "out", num_workers=1)) == -signal.SIGKILL
    monkeypatch.undo()
    partial = tmp_path / ".out.partial"
    for file in partial.rglob("data/**/*"):
        if file.suffix in (".distcp", ".safetensors"):
            data = bytearray(file.read_bytes())
            data[len(data) // 4] ^= 1
            file.write_bytes(data)
    with (partial / "journal.jsonl").open("a") as stream:
        stream.write('{"key": "decod')
    convert(tmp_path / "out", resume=True)
    check(tmp_path / "out")


def test_disk_that_fills_up_within_a_tensor_resumes(direction, tmp_path, monkeypatch):
    convert, _, check = direction
    pwrite, room = os.pwrite, [100_000]

    def until_full(descriptor, data, offset):
        room[0] -= len(data)
        if room[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", until_full)
    with pytest.raises(UserError, match="is full; free some space and run again with --resume"):
        convert(tmp_path / "out")
    monkeypatch.undo()
    assert names_in(tmp_path) == [".out.partial"]
    convert(tmp_path / "out", resume=True)
    check(tmp_path / "out")


def test_too_little_space_is_found_before_writing(direction, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match=r"0\.0 GB free"):
        direction[0](tmp_path / "out")
    assert names_in(tmp_path) == []


def test_existing_output_is_replaced_only_by_force(direction, tmp_path):
    convert, _, check = direction
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("mine")
    with pytest.raises(UserError, match="out exists; choose another name, or replace it with --force"):
        convert(tmp_path / "out")
    with pytest.raises(UserError, match="holds other things than a model or a checkpoint, and --force would"):
        convert(tmp_path / "out", force=True)
    assert names_in(tmp_path / "out") == ["precious"]
    (tmp_path / "out" / "config.json").write_text("{}")
    (tmp_path / "out" / "iter_0000000").mkdir()
    convert(tmp_path / "out", force=True)
    assert not (tmp_path / "out" / "precious").exists()
    check(tmp_path / "out")
    assert names_in(tmp_path) == ["out"]
    (tmp_path / "empty").mkdir()
    convert(tmp_path / "empty", force=True)
    check(tmp_path / "empty")


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_that_appears_meanwhile_is_not_replaced(force, direction, tmp_path, monkeypatch):
    convert, writer, check = direction

    def appear():
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "precious").write_text("mine")

    fail_after(monkeypatch, writer, 5, appear)
    with pytest.raises(UserError, match="force" if force else "out exists; choose another name"):
        convert(tmp_path / "out", force=force)
    assert names_in(tmp_path / "out") == ["precious"]
    (tmp_path / "out").rename(tmp_path / "moved")
    convert(tmp_path / "out", resume=True)
    check(tmp_path / "out")


def test_a_file_is_not_replaced(direction, tmp_path):
    convert, _, _ = direction
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="holds other things"):
        convert(tmp_path / "file", force=True)
    assert (tmp_path / "file").read_text() == "mine"


def test_an_output_that_cannot_be_made_is_refused(direction, tmp_path):
    convert, _, _ = direction
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="cannot be made"):
        convert(tmp_path / "file" / "out")
    for name in ("/", "n" * 300):
        with pytest.raises(UserError, match=r"^--output .*(is no folder that can|cannot) be made"):
            convert(tmp_path / name)
    (tmp_path / ".out.partial" / "lock").mkdir(parents=True)  # as root, who may open any file
    with pytest.raises(UserError, match=r"out cannot be made \(Is a directory\); choose another folder"):
        convert(tmp_path / "out", resume=True)
