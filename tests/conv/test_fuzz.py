"""Files that are not what they should be: a message each, no other exception, no hang, bounded memory."""

import json
import resource
import shutil
import struct
from contextlib import closing, suppress

import pytest
from conv_models import save_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoints_conv.formats.safetensors_io import SafetensorsFolder
from checkpoints_conv.formats.torch_dist import LATEST, METADATA, TorchDistReader
from checkpoints_conv.hf_to_megatron import hf_to_megatron
from checkpoints_conv.inspect import summarize
from checkpoints_conv.megatron_to_hf import megatron_to_hf
from nemo_grpo import UserError
from nemo_grpo.models import family_for
from nemo_grpo.support.model_folder import hf_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
MEBIBYTES = 700
FUZZ = settings(
    max_examples=120, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)


SCALARS = st.sampled_from(
    [
        *(None, True, False, -1, 0, 1, 3, 10**9, 1 << 40, 10**30, 10**400, -(10**30), 0.5, 4.0, 1e308, -1.5),
        *(float("nan"), float("inf"), "", "x", "8", "nan", "../x", "/etc/passwd", "\0", "é" * 300),
    ]
)
VALUES = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=3),
    st.dictionaries(st.sampled_from(["rope_type", "depth", "x", "hidden_size", "type"]), SCALARS, max_size=3),
    st.just(json.loads("[" * 400 + "]" * 400)),
)


@pytest.fixture(scope="module", autouse=True)
def bounded_memory():
    """The module's examples take no more than some hundred megabytes beyond what was taken before."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEBIBYTES << 10


def paths_in(content, path=()):
    """Every place in a JSON object."""
    for key, value in content.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from paths_in(value, (*path, key))


def with_value(content, path, value):
    """A copy in which the place holds another value."""
    changed = json.loads(json.dumps(content))
    section = changed
    for key in path[:-1]:
        section = section[key]
    section[path[-1]] = value
    return changed


def changed(good, values=VALUES):
    """Copies of a JSON object, in each of which one place holds another value."""
    return st.builds(with_value, st.just(good), st.sampled_from(list(paths_in(good))), values)


def fuzz(contents, write, *reads):
    """Write each of the contents, and read it in each way: nothing but `UserError` comes of it."""

    @FUZZ
    @given(contents)
    def check(content):
        write(content)
        for read in reads:
            with suppress(UserError):
                read()

    check()


@pytest.mark.parametrize("family", ["llama3-rope", "qwen2.5-vl", "gemma3", "deepseek-v3", "gpt-oss"])
def test_values_of_config(family, tmp_path):
    folder, out = save_model(family, tmp_path / "model"), tmp_path / "out"
    file, config = folder / "config.json", hf_config(folder)
    absent = ("mlp_only_layers", "sliding_window", "num_experts", "n_shared_experts", "quantization_config")
    config = dict.fromkeys(absent) | config

    def write(content):
        file.write_text(json.dumps(content))
        shutil.rmtree(out, ignore_errors=True)

    reads = lambda: summarize(folder), lambda: hf_to_megatron(folder, out, force=True)
    fuzz(changed(config), write, *reads)


def test_bytes_of_config(tmp_path):
    contents = st.one_of(
        st.binary(max_size=60), st.sampled_from([b"[" * 200_000, b'{"a":' * 9000, b"1" * 9000])
    )
    fuzz(contents, (tmp_path / "config.json").write_bytes, lambda: family_for(hf_config(tmp_path)))


def write_safetensors(file, header, data=b""):
    file.write_bytes(struct.pack("<Q", len(header)) + header + data)


def read_all(folder):
    with closing(SafetensorsFolder(folder)) as weights:
        for name in weights.tensors:
            weights.read(name)


def test_headers_of_safetensors(tmp_path):
    good = {"x": {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]}, "__metadata__": {"format": "pt"}}
    headers = changed(good).map(lambda content: json.dumps(content).encode())
    fuzz(
        headers | st.binary(max_size=40) | st.just(b"[" * 200_000),
        lambda header: write_safetensors(tmp_path / "model.safetensors", header, bytes(8)),
        lambda: read_all(tmp_path),
    )


@pytest.fixture
def damaged(tmp_path):
    """A model and its checkpoint, to be damaged."""
    model = save_model("qwen3-moe", tmp_path / "model", num_hidden_layers=1)
    return model, hf_to_megatron(model, tmp_path / "megatron")


BOMBS = (
    b"\x80\x04})" + b"\x85" * 2_000_000 + b"K\x01s.",
    b"\x80\x04})" + b"2\x86" * 60 + b"K\x01s.",
    b"\x80\x04Nr\xff\xff\xff\x7f.",
)
"""Pickles that are short and take the stack, the time or the memory."""


def test_metadata_and_trackers_that_take_stack_time_or_memory_are_damaged(damaged):
    _, megatron = damaged
    for tracker in ("9" * 5000, "1/../..", "\u00b2"):
        (megatron / LATEST).write_text(tracker)
        with suppress(UserError):
            TorchDistReader(megatron).close()
    (megatron / LATEST).write_text("0")
    for content in BOMBS:
        (megatron / "iter_0000000" / METADATA).write_bytes(content)
        with pytest.raises(UserError, match=r"is damaged or truncated"):
            TorchDistReader(megatron)


def test_flipped_bytes_of_the_metadata(damaged, tmp_path):
    model, megatron = damaged
    file = megatron / "iter_0000000" / METADATA
    good = file.read_bytes()
    places = st.tuples(st.integers(0, len(good) - 1), st.integers(0, 255))

    def copy(changes):
        content = bytearray(good)
        for at, value in changes:
            content[at] = value
        return bytes(content)

    contents = st.lists(places, min_size=1, max_size=4).map(copy)
    fuzz(contents, file.write_bytes, lambda: megatron_to_hf(megatron, model, tmp_path / "hf", force=True))
