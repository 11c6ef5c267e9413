"""Where conversions read and write: links, file systems without locks, other folders of the same model."""

import errno
import os
import re
import resource
import shutil

import pytest
import torch
from conv_models import assert_same_tensors, names_in, rewrite, save_model, tensors_of
from transformers import AutoModelForCausalLM, dynamic_module_utils

from checkpoints_conv.formats.dtypes import DTYPES
from checkpoints_conv.formats.pieces import close_all, open_all
from checkpoints_conv.formats.safetensors_writer import SafetensorsWriter
from checkpoints_conv.formats.torch_dist import LATEST, TorchDistReader, find_checkpoint
from checkpoints_conv.hf_to_megatron import hf_to_megatron
from checkpoints_conv.megatron_to_hf import copy_with_config, megatron_to_hf
from checkpoints_conv.run_config import RUN_CONFIG, read_section
from checkpoints_conv.verify import verify
from nemo_grpo import UserError
from nemo_grpo.support import files
from nemo_grpo.support.hf_folder import export
from nemo_grpo.support.model_folder import hf_config


def test_resumption_needs_space_for_what_is_left_only(source, checkpoint, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(SafetensorsWriter, "write_index", lambda _self: 1 / 0)  # all tensors are written
        with pytest.raises(ZeroDivisionError):
            megatron_to_hf(checkpoint, source, tmp_path / "out")
    nothing_free = shutil._ntuple_diskusage(10**9, 10**9, 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: nothing_free)
    megatron_to_hf(checkpoint, source, tmp_path / "out", resume=True)
    assert_same_tensors(tensors_of(tmp_path / "out"), tensors_of(source))


def test_progress_is_shown_in_bytes_to_the_end(source, tmp_path, caplog):
    caplog.set_level("INFO")
    hf_to_megatron(source, tmp_path / "megatron")
    megatron_to_hf(tmp_path / "megatron", source, tmp_path / "hf")
    verify(source, tmp_path / "megatron")
    for work in ("hf-to-megatron", "megatron-to-hf", "verify"):
        assert re.search(rf"{work} 0\.00 of 0\.00 GB, \d+ MB/s, 0 s left", caplog.text), work


def test_conversions_leave_no_file_open(source, tmp_path):
    number = []
    for name in ("first", "second", "third"):  # the first may open what the process keeps
        hf_to_megatron(source, tmp_path / name)
        megatron_to_hf(tmp_path / name, source, tmp_path / f"{name}_hf")
        verify(source, tmp_path / name)
        number.append(len(os.listdir("/proc/self/fd")))
    assert number[1:] == number[:1] * 2


def test_file_system_without_locks_is_no_other_process(source, tmp_path, monkeypatch, caplog):
    def flock(*_args):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))  # Lustre, mounted without -o flock

    monkeypatch.setattr(files.fcntl, "flock", flock)
    hf_to_megatron(source, tmp_path / "out")
    assert "no locks" in caplog.text


def test_output_that_is_a_link_is_refused_before_anything_is_converted(source, checkpoint, tmp_path):
    (tmp_path / "model").mkdir()
    for name in ("model", "absent"):
        (tmp_path / f"to-{name}").symlink_to(tmp_path / name)
        with pytest.raises(UserError, match=rf"is a link to .*{name}; give that"):
            megatron_to_hf(checkpoint, source, tmp_path / f"to-{name}", force=True)
    assert names_in(tmp_path) == ["model", "to-absent", "to-model"]


def test_force_does_not_replace_what_is_read(source, checkpoint, tmp_path):
    base = shutil.copytree(source, tmp_path / "base")
    for output in (base, tmp_path):
        with pytest.raises(UserError, match="would be deleted"):
            megatron_to_hf(checkpoint, base, output, force=True)
    assert names_in(base) == names_in(source)
    with pytest.raises(UserError, match="overlaps the source"):
        hf_to_megatron(base, base / "inside", force=True)
    with pytest.raises(UserError, match="overlaps the source"):
        megatron_to_hf(checkpoint, source, checkpoint, force=True)


def test_config_names_the_dtype_of_most_bytes(source, tmp_path):
    """Embeddings, which come first, in float32 and the layers in bfloat16."""

    def halve(tensors):
        for name in tensors.keys() - {"model.embed_tokens.weight"}:
            tensors[name] = tensors[name].bfloat16()

    model = shutil.copytree(source, tmp_path / "model")
    rewrite(model, halve)
    hf_to_megatron(model, tmp_path / "megatron")
    section = read_section(tmp_path / "megatron" / "iter_0000000" / RUN_CONFIG, "model")
    assert section["params_dtype"]["_target_"] == "torch.bfloat16"
    assert hf_config(megatron_to_hf(tmp_path / "megatron", model, tmp_path / "hf"))["dtype"] == "bfloat16"


@pytest.mark.parametrize("tokenizer", [None, "tokenizer.json", "tokenizer.model"])
def test_missing_tokenizer_is_warned_of(source, tmp_path, caplog, tokenizer):
    model, target = shutil.copytree(source, tmp_path / "model"), tmp_path / "target"
    target.mkdir()
    for file in model.glob("tokenizer*"):
        file.unlink()
    if tokenizer is not None:
        (model / tokenizer).write_text("{}")
    copy_with_config(model, target, DTYPES["float32"])
    assert ("has no tokenizer, so the result has none either" in caplog.text) == (tokenizer is None)
    assert (target / "config.json").exists()


def test_one_of_several_iterations_must_be_named_and_whole(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "copy")
    first, other = folder / "iter_0000000", folder / "iter_0000005"
    shutil.copytree(first, other)
    latest = folder / "latest_checkpointed_iteration.txt"
    latest.write_text("5")
    assert find_checkpoint(folder) == other
    with pytest.raises(UserError, match="is not a folder; give a Megatron checkpoint"):
        TorchDistReader(latest)
    (folder / "iter_0000200").mkdir()  # was not copied to the end
    latest.write_text("200")
    with pytest.raises(UserError, match="names iter_0000200, which is not there"):
        find_checkpoint(folder)
    assert find_checkpoint(first) == first
    (folder / "iter_0000200").rmdir()
    latest.unlink()
    with pytest.raises(
        UserError, match=r"several iterations \(iter_0000000, iter_0000005\); give the folder"
    ):
        find_checkpoint(folder)
    shutil.rmtree(first)
    assert find_checkpoint(folder) == other


def test_a_tracker_that_says_release_names_that_folder(checkpoint, tmp_path):
    """Converted base models of Megatron-LM and slime have one; later iterations may lie beside it."""
    folder = shutil.copytree(checkpoint, tmp_path / "copy")
    release, later = folder / "release", folder / "iter_0000003"
    (folder / "iter_0000000").rename(release)
    latest = folder / "latest_checkpointed_iteration.txt"
    latest.write_text("release\n")
    assert find_checkpoint(folder) == release
    shutil.copytree(release, later)
    assert find_checkpoint(folder) == release
    latest.write_text("3")
    assert find_checkpoint(folder) == later
    latest.unlink()
    with pytest.raises(UserError, match=r"several iterations \(iter_0000003, release\); give the folder"):
        find_checkpoint(folder)
    latest.write_text("release")
    shutil.rmtree(release)
    with pytest.raises(UserError, match="names release, which is not there or not whole"):
        find_checkpoint(folder)


TINY_CODE = {
    "tiny_config.py": "from transformers import Qwen2Config\n\n\nclass Config(Qwen2Config):\n    pass\n",
    "tiny_model.py": (
        "from transformers import Qwen2ForCausalLM\n\nfrom .helpers import answer\n"
        "from .tiny_config import Config\n\n\nclass Model(Qwen2ForCausalLM):\n"
        "    config_class = Config\n    answer = answer\n"
    ),
    "helpers.py": "from .more import answer\n",
    "more.py": "answer = 42\n",
}


def with_code(source, folder, files):
    model = shutil.copytree(source, folder)
    for name, text in files.items():
        (model / name).write_text(text)
    named = {"AutoConfig": "tiny_config.Config", "AutoModelForCausalLM": "tiny_model.Model"}
    rewrite(model, auto_map=named)
    return model


def test_code_that_auto_map_names_is_exported_with_what_it_imports(source, checkpoint, tmp_path, monkeypatch):
    model = with_code(source, tmp_path / "model", {**TINY_CODE, "unused.py": ""})
    back = megatron_to_hf(checkpoint, model, tmp_path / "back")
    assert {path.name for path in back.glob("*.py")} == set(TINY_CODE)
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    loaded = AutoModelForCausalLM.from_pretrained(back, trust_remote_code=True)
    assert (type(loaded).__name__, loaded.answer) == ("Model", 42)


def test_auto_map_without_its_files_is_left_out(source, checkpoint, tmp_path):
    model = with_code(source, tmp_path / "model", {})
    back = megatron_to_hf(checkpoint, model, tmp_path / "back")
    assert "auto_map" not in hf_config(back)
    assert type(AutoModelForCausalLM.from_pretrained(back)).__name__ == "Qwen2ForCausalLM"


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json", "chat_template.jinja"])
def test_a_git_lfs_pointer_is_no_tokenizer(name, source, checkpoint, tmp_path):
    model = shutil.copytree(source, tmp_path / "model")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 7\n"
    (model / name).write_text(pointer)
    with pytest.raises(UserError, match=f"{name} is a git-lfs pointer, not the file itself; run `git lfs"):
        megatron_to_hf(checkpoint, model, tmp_path / "out")
    assert names_in(tmp_path) == ["model"]


@pytest.mark.parametrize(
    ("rope", "warns"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, False),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, True),
    ],
)
def test_rope_scaling_that_run_config_cannot_say_is_warned_of(tmp_path, caplog, rope, warns):
    base = save_model("qwen2", tmp_path / "base", dtype=torch.bfloat16)
    rewrite(base, rope_parameters=rope)
    hf_to_megatron(base, tmp_path / "out")
    assert (f"rope_type {rope['rope_type']}" in caplog.text) == warns


def test_more_files_than_a_process_may_open_by_default(source, checkpoint, monkeypatch):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 1, hard))
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


def test_only_files_that_models_have_reach_an_export(source, checkpoint, tmp_path, caplog):
    model = shutil.copytree(source, tmp_path / "model")
    known = {"tiktoken.model": "YQ== 0", "additional_chat_templates/tool_use.jinja": "{{ tools }}"}
    (model / "additional_chat_templates").mkdir()
    (model / "adapter_config.json").write_text("{}")
    for name in (*known, ".env", "id_rsa", "notes.txt", "additional_chat_templates/notes.txt"):
        (model / name).write_text(known.get(name, "x"))
    rewrite(model, transformers_weights="other.safetensors")
    converted = megatron_to_hf(checkpoint, model, tmp_path / "converted")
    export(tensors_of(model).items(), model, tmp_path / "trained", torch.float32, None)
    for folder in (converted, tmp_path / "trained"):
        assert {name: (folder / name).read_text() for name in known} == known
        assert names_in(folder / "additional_chat_templates") == ["tool_use.jinja"]
        assert not {".env", "id_rsa", "notes.txt", "adapter_config.json"} & set(names_in(folder))
    assert "transformers_weights" not in hf_config(converted)
    assert "not copied, since models have no such files: .env, " in caplog.text


def test_a_link_within_the_hubs_cache_is_followed(source, checkpoint, tmp_path):
    cache = tmp_path / "models--a--b"
    snapshot = cache / "snapshots" / "0123"
    shutil.copytree(source, snapshot)
    (cache / "blobs").mkdir()
    (cache / "blobs" / "x").write_text("a\nb\n")
    (snapshot / "vocab.txt").symlink_to("../../blobs/x")
    exported = megatron_to_hf(checkpoint, snapshot, tmp_path / "hf")
    assert (exported / "vocab.txt").read_text() == "a\nb\n"


def test_a_link_that_leaves_the_folder_is_refused(source, checkpoint, tmp_path):
    model = shutil.copytree(source, tmp_path / "model")
    (model / "additional_chat_templates").mkdir()
    for link in (model / "merges.txt", model / "additional_chat_templates" / "other.jinja"):
        link.symlink_to("/etc/passwd")
        with pytest.raises(UserError, match=rf"{link.name} is a link to /etc/passwd, outside"):
            megatron_to_hf(checkpoint, model, tmp_path / "other")
        link.unlink()
