"""Damaged and malicious files."""

import enum
import json
import os
import pickle
import shutil
import sys
import types
from dataclasses import replace
from pathlib import Path, PosixPath

import pytest
import torch
from conv_models import names_in, rewrite, tensors_of
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)

from checkpoints_conv.formats.torch_dist import TorchDistReader
from checkpoints_conv.hf_to_megatron import hf_to_megatron
from checkpoints_conv.inspect import summarize
from checkpoints_conv.megatron_to_hf import megatron_to_hf
from checkpoints_conv.verify import verify
from nemo_grpo import UserError
from nemo_grpo.support.files import check_sha256
from nemo_grpo.support.hf_folder import stream_weights


def in_shards(change):
    """Damage to the index of a model in several files; ``change`` gets it and the first file."""

    def damage(model):
        tensors, files = tensors_of(model), ("model-1.safetensors", "model-2.safetensors")
        (model / "model.safetensors").unlink()
        where = {name: files[number % 2] for number, name in enumerate(sorted(tensors))}
        for file in files:
            save_file({name: tensors[name] for name in where if where[name] == file}, model / file)
        change(where, model / files[0])
        (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))

    return damage


def truncated_model(model):
    os.truncate(model / "model.safetensors", (model / "model.safetensors").stat().st_size - 1)


def pickled(model):
    (model / "model.safetensors").unlink()
    torch.save({}, model / "pytorch_model.bin")


def linked(model):
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to("../blobs/0123")  # a download that was not finished


def with_a_wrong_index(model):
    (model / "model.safetensors").rename(model / "model-1.safetensors")
    (model / "model.safetensors.index.json").write_text('{"weight_map": ["a"]}')


DAMAGED_MODELS = {
    r"model.safetensors is damaged or truncated: it has \d+ bytes": truncated_model,
    "damaged or truncated: a header of": lambda m: (m / "model.safetensors").write_bytes(b"\xff" * 100),
    r"names tensors that are not in model-1\.safetensors: lost; download": in_shards(
        lambda where, first: where.update(lost=first.name)
    ),
    r"index.json names model-1\.safetensors, missing here; download": in_shards(
        lambda _, file: file.unlink()
    ),
    r"pytorch_model.bin is a pickle.*save_pretrained": pickled,
    r"model\.safetensors is a link to .*0123, which is not there": linked,
    "is not a safetensors index": with_a_wrong_index,
    r"has adapter_config.json beside config.json.*merge it first, or move it away": lambda model: (
        model / "adapter_config.json"
    ).write_text("{}"),
    "has transformers_weights='other.safetensors', so": lambda m: rewrite(
        m, transformers_weights="other.safetensors"
    ),
}


@pytest.mark.parametrize("message", DAMAGED_MODELS)
def test_a_damaged_model_is_refused_and_leaves_nothing(message, source, checkpoint, tmp_path):
    model = shutil.copytree(source, tmp_path / "model")
    DAMAGED_MODELS[message](model)
    reads = [lambda: hf_to_megatron(model, tmp_path / "out"), lambda: verify(model, checkpoint)]
    if "missing here" in message:
        reads.append(lambda: list(stream_weights(model)))
    for read in reads:
        with pytest.raises(UserError, match=message):
            read()
    assert names_in(tmp_path) == ["model"]


@pytest.fixture
def folder(checkpoint, tmp_path):
    """A copy of the checkpoint, to be damaged."""
    return shutil.copytree(checkpoint, tmp_path / "copy")


def largest_file(folder):
    return max(folder.rglob("*.distcp"), key=lambda path: path.stat().st_size)


def change_metadata(folder, change):
    """``change`` its ``.metadata`` in place, or put what it returns there."""
    path = folder / "iter_0000000" / ".metadata"
    content = pickle.loads(path.read_bytes())
    path.write_bytes(pickle.dumps(change(content) or content))
    return path


def truncated(folder):
    file = largest_file(folder)
    os.truncate(file, file.stat().st_size // 2)


def truncated_in_a_state(folder):
    path = folder / "iter_0000000" / ".metadata"
    stored = pickle.loads(path.read_bytes()).storage_data.items()
    file = path.with_name(next(place.relative_path for index, place in stored if "_extra_state" in index.fqn))
    last = max((place.offset, index.fqn) for index, place in stored if place.relative_path == file.name)
    assert "_extra_state" in last[1]  # behind the last tensor
    os.truncate(file, file.stat().st_size - 1)


def with_a_flipped_bit(folder):
    file, reader = largest_file(folder), TorchDistReader(folder)
    chunks = [c for key in reader.weights.values() for c in key.chunks if c.file == file.name]
    chunk = max(chunks, key=lambda c: c.length)  # so large that its middle is data
    reader.close()
    data = bytearray(file.read_bytes())
    data[chunk.start + chunk.length // 2] ^= 1
    file.write_bytes(data)


def metadata(change):
    """Damage to the metadata; ``change`` gets them, and the name of their first tensor."""

    def damage(folder):
        def of_first_tensor(content):
            tensors = content.state_dict_metadata.items()
            return change(content, next(n for n, one in tensors if isinstance(one, TensorStorageMetadata)))

        change_metadata(folder, of_first_tensor)

    return damage


def with_another_offset(content, name):
    """Of the first chunk, where the tensor's chunks are and where they lie in the files."""
    chunk = content.state_dict_metadata[name].chunks[0]
    index = next(i for i in content.storage_data if (i.fqn, i.offset) == (name, chunk.offsets))
    chunk.offsets = torch.Size([0] * 9)
    content.storage_data[replace(index, offset=chunk.offsets)] = content.storage_data.pop(index)


def with_a_transform(content, name):
    for index, place in content.storage_data.items():
        if index.fqn == name:
            place.transform_descriptors = ["zstd"]


def outside(content, _name):
    for place in content.storage_data.values():
        place.relative_path = f"../{place.relative_path}"


def with_a_gap(content, _name):
    del content.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"].chunks[2]


DAMAGES = {
    r"distcp is damaged or truncated: it has \d+ bytes": truncated,
    r"is damaged or truncated: it has \d+ bytes, .metadata": truncated_in_a_state,
    "is missing; copy the whole checkpoint folder": lambda folder: largest_file(folder).unlink(),
    "does not match its checksum": with_a_flipped_bit,
    "points outside the checkpoint": metadata(outside),
    r"linear_fc2\.weight has gaps or overlaps": metadata(with_a_gap),
    "it holds no torch_dist metadata": metadata(lambda _content, _name: ["a list"]),
    r"is stored with \['zstd'\]; save it uncompressed": metadata(with_a_transform),
    "are no sizes": metadata(
        lambda content, name: setattr(content.state_dict_metadata[name], "size", (-4, 4))
    ),
    "has chunks of another rank, or no dtype": metadata(
        lambda content, name: setattr(
            content.state_dict_metadata[name].chunks[0], "sizes", torch.Size([1] * 9)
        )
    ),
    "of another rank, or no dtype": metadata(
        lambda content, name: setattr(content.state_dict_metadata[name].properties, "dtype", None)
    ),
    "has chunks at places of another rank": metadata(with_another_offset),
    "which no checkpoint needs; it may be malicious and was not read": lambda folder: change_metadata(
        folder, lambda _: Malicious(folder / "owned")
    ),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_leaves_no_export(source, folder, tmp_path, message):
    DAMAGES[message](folder)
    with pytest.raises(UserError, match=message):
        megatron_to_hf(folder, source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not (folder / "owned").exists()


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


def test_enumerations_pickled_by_name_are_read(checkpoint, folder, monkeypatch):
    """Python 3.11.2, Debian 12's, writes ``builtins.getattr(cls, name)`` for a member."""
    with monkeypatch.context() as patch:
        patch.setattr(enum.Enum, "__reduce_ex__", lambda self, _protocol: (getattr, (type(self), self.name)))
        path = change_metadata(folder, lambda _: None)
    assert b"getattr" in path.read_bytes()
    by_name, by_value = TorchDistReader(folder), TorchDistReader(checkpoint)
    assert by_name.keys == by_value.keys


class Attribute:
    """An attribute of something that a checkpoint may name, reached through ``getattr``."""

    def __init__(self, owner, name):
        self.owner, self.name = owner, name

    def __reduce__(self):
        return getattr, (self.owner, self.name)


@pytest.mark.parametrize(
    "attribute",
    [
        Attribute(PosixPath, "touch"),  # known, and no enumeration
        Attribute(TensorStorageMetadata, "__init__"),  # a record, and no enumeration
        Attribute(Attribute(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT"), "__class__"),  # a member
        Attribute("text", "format"),
    ],
)
def test_attributes_of_anything_but_an_enumeration_are_refused(folder, attribute):
    change_metadata(folder, lambda _: attribute)
    with pytest.raises(UserError, match=r"asks for an attribute .* may be malicious and was not read"):
        TorchDistReader(folder)


def test_malicious_chunk_runs_nothing(folder, tmp_path):
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


def test_any_damaged_header_is_one_message(folder):
    """Every byte of a chunk's archive directory, of its pickle and of the headers, three bits of each."""
    reader = TorchDistReader(folder)
    key, chunk = next((n, c) for n, k in reader.weights.items() if "norm" in n for c in k.chunks)
    file = reader.folder / chunk.file
    good, expected = file.read_bytes(), reader.read(key, chunk.offsets, chunk.sizes)
    found = dict.fromkeys(("refused", "harmless"), 0)
    for place in range(chunk.start, chunk.start + chunk.length):
        for bit in (0, 3, 7):
            with file.open("r+b") as stream:
                stream.seek(place)
                stream.write(bytes([good[place] ^ 1 << bit]))
            try:
                same = torch.equal(reader.read(key, chunk.offsets, chunk.sizes), expected)
                assert same, (place, bit)
                found["harmless"] += 1
            except UserError:
                found["refused"] += 1
        with file.open("r+b") as stream:
            stream.seek(place)
            stream.write(good[place : place + 1])
    reader.close()
    assert min(found.values()) > 100


@pytest.mark.parametrize(
    ("module", "name", "base"),
    [
        ("pathlib._local", "PosixPath", PosixPath),
        ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata", Metadata),
    ],
    ids=["Python 3.13", "megatron-core 0.15"],
)
def test_metadata_of_other_writers_are_read(module, name, base, source, folder, tmp_path, monkeypatch):
    kind = type(name, (base,), {"__module__": module})
    monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(**{name: kind}))

    def as_written_there(content):
        if base is Metadata:
            return kind(**vars(content))
        content.storage_meta = StorageMeta(checkpoint_id=kind("/runs/x"))

    change_metadata(folder, as_written_there)
    megatron_to_hf(folder, source, tmp_path / "out")


def stored_as(dtype, itemsize, folder):
    """Write a file with one tensor of four numbers of a dtype, by hand."""
    place = {"dtype": dtype, "shape": [4], "data_offsets": [0, int(4 * itemsize)]}
    header = json.dumps({"w": place}).encode()
    (folder / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + bytes(int(4 * itemsize))
    )
    return folder


@pytest.mark.parametrize(
    ("dtype", "itemsize"), [("F8_E8M0", 1), ("U64", 8), ("C64", 8), ("U16", 2), ("U32", 4)]
)
def test_every_dtype_of_safetensors_is_known(dtype, itemsize, tmp_path):
    (_, shape, _, num_bytes) = summarize(stored_as(dtype, itemsize, tmp_path)).tensors[0]
    assert (shape, num_bytes) == ((4,), 4 * itemsize)


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "F6_E3M2"])
def test_numbers_below_a_byte_are_not_called_damaged(dtype, tmp_path):
    with pytest.raises(UserError, match=f"w in .* is stored as {dtype}, which is not read; dequantise"):
        summarize(stored_as(dtype, 0.75, tmp_path))


def test_weights_of_a_dtype_that_is_not_converted_are_named(source, tmp_path):
    model = shutil.copytree(source, tmp_path / "model")
    name = "model.norm.weight"
    rewrite(model, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e8m0fnu)}))
    with pytest.raises(UserError, match=f"{name} is stored as torch.float8_e8m0fnu; dequantise the model"):
        hf_to_megatron(model, tmp_path / "out")


def test_packed_experts_are_answered_with_the_form_that_is_read(hf_models, tmp_path):
    """transformers packs a layer's experts in memory, and unpacks them when it saves."""
    model = shutil.copytree(hf_models("qwen3-moe"), tmp_path / "model")

    def pack(tensors):
        prefix = "model.layers.0.mlp.experts."
        parts = {
            kind: [tensors.pop(f"{prefix}{n}.{kind}_proj.weight") for n in range(4)]
            for kind in ("gate", "up", "down")
        }
        both = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
        tensors[f"{prefix}gate_up_proj"] = torch.stack(both)
        tensors[f"{prefix}down_proj"] = torch.stack(parts["down"])

    rewrite(model, pack)
    remedy = r"not known: .*gate_up_proj; .*save_pretrained\(FOLDER, save_original_format=True\)"
    with pytest.raises(UserError, match=remedy):
        hf_to_megatron(model, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("qwen2", "config.json has tie_word_embeddings=true,"),
        ("qwen2.5-vl", r"config.json has text_config\.tie_word_embeddings=true,"),
        ("gemma3", "config.json has no tie_word_embeddings, which gemma3_text takes for true,"),
    ],
)
def test_the_key_that_ties_the_embeddings_is_quoted(name, where, hf_models, tmp_path):
    model = shutil.copytree(hf_models(name), tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config.pop("tie_word_embeddings", None)
    if name == "qwen2":
        config["tie_word_embeddings"] = True
    if name == "qwen2.5-vl":
        config["text_config"]["tie_word_embeddings"] = True
    rewrite(model, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(96, 32)}))
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=where + ".* are the weights and config.json of the same model"):
        hf_to_megatron(model, tmp_path / "out")
