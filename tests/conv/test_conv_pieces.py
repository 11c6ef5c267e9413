"""Tensors that travel in pieces: archives at an offset, blocks joined from chunks, memory, start-up."""

import io
import json
import math
import os
import subprocess
import sys
import zipfile

import pytest
import torch
from conv_models import write_chunk
from processes import wait_for
from safetensors.torch import save as save_tensors

from checkpoints_conv import job
from checkpoints_conv.formats.archive import SavedTensor, Section, TensorReference, save
from checkpoints_conv.formats.dtypes import DTYPES, WEIGHT_DTYPES, byte_view
from checkpoints_conv.formats.pieces import PIECE_BYTES, same
from checkpoints_conv.formats.safetensors_writer import SafetensorsWriter
from checkpoints_conv.formats.torch_dist import TorchDistReader
from checkpoints_conv.formats.torch_dist_writer import TorchDistWriter
from checkpoints_conv.job import flush_behind
from nemo_grpo import UserError
from nemo_grpo.models import family_for

MARKER = b"before the archive"


def archive_of(tensor, path, num_pieces=3):
    """Save a tensor piece by piece behind other bytes. Returns: its section of the file."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    os.write(descriptor, MARKER)
    section = Section(descriptor, len(MARKER))
    dtype = DTYPES[str(tensor.dtype).removeprefix("torch.")]
    data = byte_view(tensor.contiguous())
    step = -(-len(data) // num_pieces) or 1
    pieces = [data[start : start + step] for start in range(0, len(data), step)]
    save(section, TensorReference(dtype, tuple(tensor.shape), "0"), {"0": pieces})
    return section


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (5,), (3, 7), (1, 2, 4), (0, 4)], ids=str)
def test_torch_loads_an_archive_that_was_written_in_pieces(dtype, shape, tmp_path):
    tensor = torch.randn(shape).to(dtype.torch)
    section = archive_of(tensor, tmp_path / "file")
    content = (tmp_path / "file").read_bytes()[len(MARKER) :]
    loaded = torch.load(io.BytesIO(content), weights_only=True)
    assert (loaded.dtype, loaded.shape, loaded.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert torch.equal(loaded.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert archive.testzip() is None  # the checksums are right
        info = archive.getinfo("archive/data/0")
        lengths = content[info.header_offset + 26 : info.header_offset + 30]
        begin = info.header_offset + 30 + int.from_bytes(lengths[:2], "little")
        assert (begin + int.from_bytes(lengths[2:], "little")) % 64 == 0
    found = SavedTensor(tmp_path / "file", section.descriptor, section.start, section.length)
    assert (found.dtype, found.shape) == (dtype, shape)
    found.finish()
    os.close(section.descriptor)


def test_tensors_with_other_strides_are_read_in_order(tmp_path):
    """torch.save keeps a transposed tensor's bytes as they lie in memory."""
    tensor = torch.arange(12.0).view(3, 4).T
    torch.save(tensor, tmp_path / "file")
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    found = SavedTensor(tmp_path / "file", descriptor, 0, (tmp_path / "file").stat().st_size)
    data = bytearray(8)
    found.read_into(4, [memoryview(data)])
    found.finish()
    os.close(descriptor)
    assert torch.frombuffer(data, dtype=torch.float32).tolist() == tensor.flatten()[1:3].tolist() == [4, 8]


@pytest.fixture
def split_checkpoint(tmp_path):
    """One key of 2 layers in 2 x 2 chunks each, rows cut at 2 and columns at 3. Returns: folder, tensor."""
    torch.manual_seed(0)
    tensor = torch.randn(2, 5, 8)
    writer, written = TorchDistWriter(tmp_path, 1), []
    for layer in range(2):
        for rows in (slice(0, 2), slice(2, 5)):
            for columns in (slice(0, 3), slice(3, 8)):
                part = tensor[layer : layer + 1, rows, columns]
                offsets = (layer, rows.start, columns.start)
                written.append(write_chunk(writer, "a.weight", (2, 5, 8), offsets, part))
    for part, inner in enumerate(tensor[:, :, None, :].chunk(2, 3)):
        written.append(write_chunk(writer, "inner", (2, 5, 1, 8), (0, 0, 0, 4 * part), inner))
    writer.finish(written, ["a._extra_state/shard_0_1"], 3)
    return tmp_path, tensor


def test_rows_are_joined_from_chunks_that_cut_rows_and_columns(split_checkpoint):
    folder, tensor = split_checkpoint
    reader = TorchDistReader(folder)
    for counts in ([5], [1, 1, 1, 1, 1], [1, 3, 1]):
        with reader.block("a.weight", (1, 0, 0), (1, 5, 8), axis=1) as block:
            rows = [bytes(block.read(count)) for count in counts]
        assert b"".join(rows) == bytes(byte_view(tensor[1]))
    with reader.block("a.weight", (0, 1, 0), (1, 3, 8), axis=1) as block:
        assert bytes(block.read(3)) == bytes(byte_view(tensor[0, 1:4]))
    assert torch.equal(reader.read("a.weight", (1, 0, 0), (1, 5, 8)), tensor[1:])
    with pytest.raises(UserError, match="inner is split along an inner axis; save it from one rank"):
        reader.read("inner", (0, 0, 0, 0), (2, 5, 1, 8))
    reader.close()


def test_checksum_covers_rows_that_were_not_asked_for(split_checkpoint):
    """Padded vocabulary rows are cut off, but a chunk with a flipped bit there is damaged all the same."""
    folder, tensor = split_checkpoint
    file = folder / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    position = content.index(bytes(byte_view(tensor[0, 4, 3:].contiguous())))
    content[position] ^= 1
    file.write_bytes(content)
    reader = TorchDistReader(folder)
    padded = reader.block("a.weight", (0, 0, 0), (1, 4, 8), axis=1)
    with pytest.raises(UserError, match="does not match its checksum"), padded as block:
        block.read(4)
    with reader.block("a.weight", (1, 0, 0), (1, 5, 8), axis=1) as block:
        block.read(5)
    reader.close()


def test_same_compares_every_byte():
    one = bytearray(range(21))
    for position in (0, 7, 8, 15, 16, 20):
        other = bytearray(one)
        assert same(memoryview(one), memoryview(other))
        other[position] ^= 1
        assert not same(memoryview(one), memoryview(other))
    assert not same(memoryview(one), memoryview(one)[:16])


def test_files_are_flushed_meanwhile(monkeypatch):
    flushed = []
    monkeypatch.setattr(job, "FLUSH_SECONDS", 0.001)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", flushed.append)
        with flush_behind([3, 4]):
            wait_for(lambda: len(flushed) >= 4)
    assert flushed[:4] == [3, 4, 3, 4]


def test_a_flush_that_fails_meanwhile_is_reported(monkeypatch):
    monkeypatch.setattr(job, "FLUSH_SECONDS", 0.001)
    ends = os.pipe()  # a pipe cannot be flushed
    flush = os.fdatasync
    tried = []
    monkeypatch.setattr(os, "fdatasync", lambda end: tried.append(end) or flush(end))
    with pytest.raises(OSError, match="Invalid argument"), flush_behind(ends):
        wait_for(lambda: bool(tried))
    for end in ends:
        os.close(end)


CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "hidden_size": 512, "intermediate_size": 512, "vocab_size": 131072,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
    "max_position_embeddings": 8,
}  # fmt: skip
CONVERT = """
import re, sys
from pathlib import Path
from nemo_grpo.cli import convert
from checkpoints_conv.hf_to_megatron import hf_to_megatron
from checkpoints_conv.megatron_to_hf import megatron_to_hf
from checkpoints_conv.verify import verify
def peak():  # in KB; getrusage would count the parent's memory
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])
source, megatron, back = (Path(sys.argv[1]) / name for name in ("source", "megatron", "back"))
if sys.argv[2] == "write":
    import torch.distributed.checkpoint
before = peak()
if sys.argv[2] == "write":
    hf_to_megatron(source, megatron)
else:
    megatron_to_hf(megatron, source, back)
    assert not verify(back, megatron).different
print(peak() - before, "torch" in sys.modules)
"""


@pytest.fixture(scope="module")
def conversions_in_processes(tmp_path_factory):
    """Growth of the peak memory in bytes, and if torch was imported, of writing and reading a checkpoint."""
    folder = tmp_path_factory.mktemp("conversions")
    source = folder / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(CONFIG))
    planned = [(name, DTYPES["bfloat16"], shape) for name, shape in family_for(CONFIG).hf_shapes.items()]
    writer = SafetensorsWriter(source, planned, 1 << 30)
    writer.close()
    measured = {}
    for work in ("write", "read"):
        command = [sys.executable, "-c", CONVERT, str(folder), work]
        result = subprocess.run(command, check=True, capture_output=True, text=True)
        growth, imports_torch = result.stdout.split()
        measured[work] = (int(growth) * 1024, imports_torch == "True")
    return measured


@pytest.mark.parametrize("work", ["write", "read"])
def test_a_conversion_holds_no_tensor(conversions_in_processes, work):
    growth, _ = conversions_in_processes[work]
    assert growth < 32 * PIECE_BYTES < 512 * 131072 * 2  # the embedding alone takes 128 MB


def test_only_writing_a_checkpoint_needs_torch(conversions_in_processes):
    imports_torch = {work: torch_imported for work, (_, torch_imported) in conversions_in_processes.items()}
    assert imports_torch == {"write": True, "read": False}


def test_a_file_of_several_dtypes_has_the_safetensors_librarys_order(tmp_path):
    dtypes = {"b": torch.bfloat16, "d": torch.float32, "a": torch.bfloat16, "c": torch.float64}
    tensors = {name: torch.full((3, 2), number, dtype=dtypes[name]) for number, name in enumerate(dtypes)}
    planned = [(name, DTYPES[str(t.dtype).removeprefix("torch.")], (3, 2)) for name, t in tensors.items()]
    writer = SafetensorsWriter(tmp_path, planned, 1 << 30)
    for name, tensor in tensors.items():
        writer.write(name, byte_view(tensor))
    writer.close()
    assert (tmp_path / "model.safetensors").read_bytes() == save_tensors(tensors, metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_number_that_is_not_finite_is_never_written(tmp_path, name, value):
    dtype = DTYPES[name]
    tensor = torch.tensor([0.0, -1.0, torch.finfo(dtype.torch).max, torch.finfo(dtype.torch).smallest_normal])
    tensor = tensor.to(torch.float64).clamp(max=torch.finfo(dtype.torch).max).to(dtype.torch)
    writer = SafetensorsWriter(tmp_path, [("w", dtype, (4,))], 1 << 30)
    writer.write("w", byte_view(tensor))
    tensor[2] = value
    with pytest.raises(UserError, match=r"^w holds NaN or inf"):
        writer.write("w", byte_view(tensor))
    writer.close()
