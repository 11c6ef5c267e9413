"""Damaged and malicious files."""

import enum
import errno
import os
import pickle
import resource
import shutil
import sys
import types
from dataclasses import replace
from pathlib import Path, PosixPath

import pytest
import torch
from conv_models import names_in, save_model, tensors_of
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)

from checkpoints_conv.formats.pieces import close_all, open_all
from checkpoints_conv.formats.safetensors_writer import SafetensorsWriter
from checkpoints_conv.formats.torch_dist import LATEST, TorchDistReader
from checkpoints_conv.hf_to_megatron import hf_to_megatron
from checkpoints_conv.megatron_to_hf import megatron_to_hf
from checkpoints_conv.verify import verify
from nemo_grpo import UserError
from nemo_grpo.support.files import check_sha256
from nemo_grpo.support.hf_folder import export, stream_weights


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
    first, index = min(hf.glob("*.safetensors")), hf / "model.safetensors.index.json"
    good = index.read_text()
    index.write_text(good.replace('"weight_map": {', f'"weight_map": {{"lost": "{first.name}",'))
    with pytest.raises(UserError, match=f"names tensors that are not in {first.name}: lost; download"):
        hf_to_megatron(hf, tmp_path / "out")
    index.write_text(good)
    first.unlink()
    for read in (lambda: hf_to_megatron(hf, tmp_path / "out"), lambda: list(stream_weights(hf))):
        with pytest.raises(UserError, match=f"index.json names {first.name}, missing here; download"):
            read()


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
}


@pytest.mark.parametrize("message", DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_leaves_no_export(source, folder, tmp_path, message):
    DAMAGES[message](folder)
    with pytest.raises(UserError, match=message):
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


def test_malicious_metadata_runs_nothing(source, folder, tmp_path):
    marker = tmp_path / "owned"
    change_metadata(folder, lambda _: Malicious(marker))
    with pytest.raises(UserError, match="which no checkpoint needs; it may be malicious and was not read"):
        megatron_to_hf(folder, source, tmp_path / "out")
    pickle.loads(pickle.dumps(Malicious(marker)))
    assert marker.exists()  # the pickle would have worked
    marker.unlink()


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


def test_pickled_weights_are_refused_with_the_remedy(source, tmp_path):
    folder = shutil.copytree(source, tmp_path / "bin", ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model.bin is a pickle.*save_pretrained"):
        hf_to_megatron(folder, tmp_path / "out")


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


def test_more_files_than_a_process_may_open_by_default(source, checkpoint, monkeypatch):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_open_files() + 2, hard))
    try:
        files = open_all([source / "config.json", source / "model.safetensors", checkpoint / LATEST])
        assert len(files) == 3
        close_all(files)
        monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
        monkeypatch.setattr(os, "open", lambda *_: (_ for _ in ()).throw(OSError(errno.EMFILE, "too many")))
        with pytest.raises(UserError, match=r"the limit is \d+; raise it with ulimit -Hn"):
            open_all([source / "config.json"])
    finally:
        monkeypatch.undo()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_files_that_cannot_be_read_are_named_before_weights_are_written(
    source, checkpoint, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, _mode: path.name != "chat_template.jinja")
        patch.setattr(SafetensorsWriter, "__init__", lambda *_: 1 / 0)
        with pytest.raises(UserError, match=r"chat_template.jinja cannot be read; change its mode"):
            megatron_to_hf(checkpoint, source, tmp_path / "out")
    assert names_in(tmp_path) == []
    with pytest.raises(UserError, match=r"0\.distcp cannot be read \(No such file .*\); copy it again"):
        open_all([tmp_path / "0.distcp"])


def test_a_place_that_cannot_be_read_is_one_message(source, tmp_path):
    place, message = tmp_path / ("n" * 300), r"cannot be read \(File name too long\); check its name and mode"
    with pytest.raises(UserError, match=message):
        megatron_to_hf(place, source, tmp_path / "out")
    with pytest.raises(UserError, match=message):
        hf_to_megatron(place, tmp_path / "out")


def num_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


SECRETS = (".env", ".git-credentials", "id_rsa", "notes.txt", "training_args.json")


def test_only_files_that_models_have_reach_an_export(source, checkpoint, tmp_path, caplog):
    shutil.copytree(source, tmp_path / "model")
    for name in SECRETS:
        (tmp_path / "model" / name).write_text("x")
    (tmp_path / "model" / "merges.txt").write_text("a b")
    found = names_in(megatron_to_hf(checkpoint, tmp_path / "model", tmp_path / "hf"))
    assert {"merges.txt", "chat_template.jinja"} <= set(found)
    assert not set(SECRETS) & set(found)
    assert "not copied, since models have no such files: .env, .git-credentials, id_rsa" in caplog.text


def test_tiktoken_and_further_chat_templates_reach_an_export(source, checkpoint, tmp_path, caplog):
    model = shutil.copytree(source, tmp_path / "model")
    further = {"tiktoken.model": "YQ== 0", "additional_chat_templates/tool_use.jinja": "{{ tools }}"}
    (model / "additional_chat_templates").mkdir()
    for name, text in {**further, "additional_chat_templates/notes.txt": "x"}.items():
        (model / name).write_text(text)
    converted = megatron_to_hf(checkpoint, model, tmp_path / "converted")
    export(tensors_of(model).items(), model, tmp_path / "trained", torch.float32, None)
    for folder in (converted, tmp_path / "trained"):
        assert {name: (folder / name).read_text() for name in further} == further
        assert names_in(folder / "additional_chat_templates") == ["tool_use.jinja"]
    assert "not copied, since models have no such files: additional_chat_templates/notes.txt" in caplog.text
    (model / "additional_chat_templates" / "other.jinja").symlink_to("/etc/passwd")
    with pytest.raises(UserError, match=r"other\.jinja is a link to /etc/passwd, outside"):
        megatron_to_hf(checkpoint, model, tmp_path / "other")


def test_a_link_that_leaves_the_folder_is_refused_and_the_hubs_cache_is_not(source, checkpoint, tmp_path):
    cache = tmp_path / "models--a--b"
    snapshot = cache / "snapshots" / "0123"
    shutil.copytree(source, snapshot)
    (cache / "blobs").mkdir()
    (cache / "blobs" / "x").write_text("a\nb\n")
    (snapshot / "vocab.txt").symlink_to("../../blobs/x")
    exported = megatron_to_hf(checkpoint, snapshot, tmp_path / "hf")
    assert (exported / "vocab.txt").read_text() == "a\nb\n"
    (snapshot / "merges.txt").symlink_to("/etc/passwd")
    with pytest.raises(UserError, match=r"merges\.txt is a link to /etc/passwd, outside of the model's"):
        megatron_to_hf(checkpoint, snapshot, tmp_path / "other")
