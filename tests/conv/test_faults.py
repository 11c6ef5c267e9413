"""Interruptions, damage and malice."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from conv_models import assert_same_tensors, save_model, tensors_of

from checkpoints_conv import safetensors_io, torch_dist_writer
from checkpoints_conv.hf_to_megatron import hf_to_megatron
from checkpoints_conv.job import check_sha256
from checkpoints_conv.megatron_to_hf import megatron_to_hf
from checkpoints_conv.torch_dist import TorchDistReader
from checkpoints_conv.verify import verify
from nemo_grpo import UserError


@pytest.fixture
def source(hf_models):
    return hf_models("qwen2")


@pytest.fixture
def checkpoint(megatron_checkpoints):
    return megatron_checkpoints("qwen2")


@pytest.fixture
def directions(source, checkpoint):
    """Both converters as functions of output and options, the call that writes, and a check of the result."""

    def check_megatron(output):
        assert not verify(source, output).different

    def check_hf(output):
        assert_same_tensors(tensors_of(output), tensors_of(source))

    return {
        "hf-to-megatron": (
            lambda output, **options: hf_to_megatron(source, output, **options),
            torch_dist_writer.TorchDistWriter,
            check_megatron,
        ),
        "megatron-to-hf": (
            lambda output, **options: megatron_to_hf(checkpoint, source, output, **options),
            safetensors_io.TensorWriter,
            check_hf,
        ),
    }


@pytest.fixture(params=["hf-to-megatron", "megatron-to-hf"])
def direction(request, directions):
    return directions[request.param]


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


def forked(function):
    """Run in a child. Returns: its exit code, negative for a signal."""
    child = os.fork()
    if child == 0:
        code = 1
        signal.signal(
            signal.SIGINT, signal.default_int_handler
        )  # a background shell starts us with it ignored
        try:
            function()
            code = 0
        except KeyboardInterrupt:
            code = 130
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)], ids=["kill -9", "ctrl-c"]
)
def test_interrupted_conversion_leaves_no_output_and_resumes(direction, number, code, tmp_path, monkeypatch):
    convert, writer, check = direction

    def interrupt():
        os.kill(os.getpid(), number)
        time.sleep(0.5)  # until the main thread has heard of it

    fail_after(monkeypatch, writer, 20, interrupt)
    assert forked(lambda: convert(tmp_path / "out", num_workers=1)) == code
    monkeypatch.undo()
    assert names_in(tmp_path) == [".out.partial"]
    with pytest.raises(UserError, match=r"unfinished conversion; finish it with --resume or start over"):
        convert(tmp_path / "out")
    count = fail_after(monkeypatch, writer, -1, None)
    convert(tmp_path / "out", resume=True)
    num_resumed, count[0] = count[0], 0
    check(tmp_path / "out")
    assert names_in(tmp_path) == ["out"]
    convert(tmp_path / "whole")
    assert 15 <= count[0] - num_resumed <= 22  # what was done before (19 writes, the rest of a unit) was kept


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


def test_full_disk_is_one_message_and_resumes(direction, tmp_path, monkeypatch):
    convert, writer, check = direction

    def full():
        raise OSError(errno.ENOSPC, "No space left on device")

    fail_after(monkeypatch, writer, 5, full)
    with pytest.raises(UserError, match="is full; free some space and run again with --resume"):
        convert(tmp_path / "out")
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
    assert names_in(tmp_path / "out") == ["precious"]
    convert(tmp_path / "out", force=True)
    assert not (tmp_path / "out" / "precious").exists()
    check(tmp_path / "out")
    assert names_in(tmp_path) == ["out"]


def test_output_must_not_overlap_the_source(source, checkpoint):
    with pytest.raises(UserError, match="overlaps the source"):
        hf_to_megatron(source, source / "inside", force=True)
    with pytest.raises(UserError, match="overlaps the source"):
        megatron_to_hf(checkpoint, source, checkpoint, force=True)


def test_resume_with_other_options_is_refused(source, tmp_path, monkeypatch):
    fail_after(
        monkeypatch, torch_dist_writer.TorchDistWriter, 5, lambda: os.kill(os.getpid(), signal.SIGKILL)
    )
    forked(lambda: hf_to_megatron(source, tmp_path / "out", num_workers=1))
    monkeypatch.undo()
    with pytest.raises(UserError, match="dtype changed since the first attempt"):
        hf_to_megatron(source, tmp_path / "out", resume=True, dtype=torch.bfloat16)
    hf_to_megatron(source, tmp_path / "out", resume=True)  # nothing was lost
    assert not verify(source, tmp_path / "out").different


def test_truncated_safetensors_is_refused(tmp_path):
    source = save_model("qwen2", tmp_path / "source")
    file = source / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(UserError, match=r"model.safetensors is damaged or truncated: it has \d+ bytes"):
        hf_to_megatron(source, tmp_path / "out")
    file.write_bytes(b"\xff" * 100)
    with pytest.raises(UserError, match="damaged or truncated: a header of"):
        hf_to_megatron(source, tmp_path / "out")
    assert names_in(tmp_path) == ["source"]


def test_missing_shard_is_named(tmp_path, source, checkpoint):
    hf = megatron_to_hf(checkpoint, source, tmp_path / "hf", max_shard_bytes=20_000)
    next(iter(sorted(hf.glob("*.safetensors")))).unlink()
    with pytest.raises(UserError, match=r"names tensors that are not in model-00001-of-\d+.safetensors"):
        hf_to_megatron(hf, tmp_path / "out")


def copy_of(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "copy")
    return folder, max(folder.rglob("*.distcp"), key=lambda path: path.stat().st_size)


def test_truncated_checkpoint_is_refused(source, checkpoint, tmp_path):
    folder, file = copy_of(checkpoint, tmp_path)
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(UserError, match="damaged or truncated"):
        megatron_to_hf(folder, source, tmp_path / "out")
    file.unlink()
    with pytest.raises(UserError, match="is missing; copy the whole checkpoint folder"):
        megatron_to_hf(folder, source, tmp_path / "out")


def test_flipped_bit_in_a_checkpoint_is_found(source, checkpoint, tmp_path):
    folder, file = copy_of(checkpoint, tmp_path)
    reader = TorchDistReader(folder)
    chunks = [c for key in reader.weights.values() for c in key.chunks if c.file == file.name]
    chunk = max(chunks, key=lambda c: c.length)  # so large that its middle is data
    reader.close()
    data = bytearray(file.read_bytes())
    data[chunk.start + chunk.length // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(UserError, match="does not match its checksum"):
        megatron_to_hf(folder, source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_flipped_bit_is_found_by_the_manifest(source, checkpoint, tmp_path):
    hf = megatron_to_hf(checkpoint, source, tmp_path / "hf", sha256=True)
    assert check_sha256(hf) == len(names_in(hf)) - 1
    assert verify(hf, checkpoint).num_hashed == len(names_in(hf)) - 1
    file = hf / "generation_config.json"
    file.write_text(file.read_text().replace("0", "1", 1) + " ")
    with pytest.raises(UserError, match=r"generation_config\.json does not match"):
        verify(hf, checkpoint)


class Malicious:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (Path.touch, (self.marker,))


def test_malicious_metadata_runs_nothing(source, checkpoint, tmp_path):
    folder, _ = copy_of(checkpoint, tmp_path)
    marker = tmp_path / "owned"
    (folder / "iter_0000000" / ".metadata").write_bytes(pickle.dumps(Malicious(marker)))
    with pytest.raises(UserError, match="which no checkpoint needs; it may be malicious and was not read"):
        megatron_to_hf(folder, source, tmp_path / "out")
    pickle.loads(pickle.dumps(Malicious(marker)))
    assert marker.exists()  # the pickle would have worked
    marker.unlink()


def test_malicious_chunk_runs_nothing(source, checkpoint, tmp_path):
    folder, _ = copy_of(checkpoint, tmp_path)
    marker = tmp_path / "owned"
    for file in folder.rglob("*.distcp"):
        size = file.stat().st_size
        torch.save(Malicious(marker), file)
        os.truncate(file, size)
    reader = TorchDistReader(folder)
    key, chunk = next((n, c) for n, k in reader.weights.items() for c in k.chunks if c.start == 0)
    payload = (reader.folder / chunk.file).read_bytes()[: chunk.length].rstrip(b"\0")
    (reader.folder / chunk.file).write_bytes(b"\0" * (chunk.length - len(payload)) + payload)
    with pytest.raises(UserError):
        reader.read(key, chunk.offsets, chunk.sizes)
    assert not marker.exists()


def test_metadata_cannot_point_outside(source, checkpoint, tmp_path):
    folder, _ = copy_of(checkpoint, tmp_path)
    path = folder / "iter_0000000" / ".metadata"
    content = pickle.loads(path.read_bytes())
    for place in content.storage_data.values():
        place.relative_path = f"../{place.relative_path}"
    path.write_bytes(pickle.dumps(content))
    with pytest.raises(UserError, match="points outside the checkpoint"):
        megatron_to_hf(folder, source, tmp_path / "out")


def test_pickled_weights_are_refused_with_the_remedy(source, tmp_path):
    folder = shutil.copytree(source, tmp_path / "bin", ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model.bin is a pickle.*save_pretrained"):
        hf_to_megatron(folder, tmp_path / "out")


def test_gaps_in_a_checkpoint_are_found(source, checkpoint, tmp_path):
    folder, _ = copy_of(checkpoint, tmp_path)
    path = folder / "iter_0000000" / ".metadata"
    content = pickle.loads(path.read_bytes())
    content.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"].chunks.pop(2)
    path.write_bytes(pickle.dumps(content))
    with pytest.raises(UserError, match=r"linear_fc2\.weight has gaps or overlaps"):
        megatron_to_hf(folder, source, tmp_path / "out")
