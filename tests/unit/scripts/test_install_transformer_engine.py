"""The installer on a host without GPU: it joins pieces, and refuses what it cannot work with."""

import hashlib
import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts/install_transformer_engine.sh"
WHEELS = (
    "transformer_engine-2.20.2-py3-none-any.whl",
    "transformer_engine_cu13-2.20.2-py3-none-manylinux_2_28_x86_64.whl",
    "transformer_engine_torch-2.20.2.tar.gz",
)


@pytest.fixture
def wheels(tmp_path):
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name in WHEELS:
        (folder / name).touch()
    return folder


def run(*arguments, **environment):
    done = subprocess.run(
        ["bash", str(SCRIPT), *arguments], capture_output=True, text=True, env={**os.environ, **environment}
    )
    return done.returncode, done.stdout + done.stderr


def cut(folder, name, content, size):
    """``split``'s pieces of a file, and its checksum."""
    for number, start in enumerate(range(0, len(content), size)):
        suffix = chr(ord("a") + number // 26) + chr(ord("a") + number % 26)
        (folder / f"{name}.part-{suffix}").write_bytes(content[start : start + size])
    (folder / f"{name}.sha256").write_text(f"{hashlib.sha256(content).hexdigest()}  {name}\n")


def test_pieces_are_joined_in_order_and_removed(tmp_path):
    content = bytes(range(256)) * 40
    cut(tmp_path, "big.whl", content, 300)  # 35 pieces: past -az
    assert run("--join-only", str(tmp_path)) == (0, "joined big.whl\n")
    assert (tmp_path / "big.whl").read_bytes() == content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["big.whl", "big.whl.sha256"]
    assert run("--join-only", str(tmp_path)) == (0, "")


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("big.whl.part-ab", "big.whl: the joined pieces do not have the checksum"),
        ("big.whl.part-aa", "has no piece"),
        ("big.whl.sha256", "big.whl.sha256 is missing"),
    ],
)
def test_lost_pieces_are_refused_and_the_others_kept(tmp_path, lost, message):
    cut(tmp_path, "big.whl", b"0123456789", 4)
    (tmp_path / lost).unlink()
    code, said = run("--join-only", str(tmp_path))
    assert code == 2
    assert message in said
    assert (tmp_path / "big.whl.part-ac").exists()


def test_wrong_arguments_folders_and_wheels_are_refused(tmp_path, wheels):
    assert "usage: install_transformer_engine.sh" in run("a", "b")[1]
    assert "is not a folder" in run(str(tmp_path / "none"))[1]
    assert "no transformer_engine-*.whl" in run(str(tmp_path))[1]
    (wheels / WHEELS[2]).rename(wheels / "transformer_engine_torch-2.11.0.tar.gz")
    assert "transformer_engine_torch-2.11.0.tar.gz is not of version 2.20.2" in run(str(wheels))[1]


@pytest.mark.parametrize(
    ("python", "has_nvcc", "message"),
    [
        ("exit 1", False, "has no torch; name one that has it"),
        ("echo none", False, "torch was built for CUDA none"),
        ("echo 13.0", False, "nvcc is neither on PATH nor in CUDA_HOME={cuda}"),
        ("echo 13.0", True, "there is no cuda_runtime_api.h, neither in {cuda}/include nor beside torch"),
        (None, False, "PYTHON=no-such-python is not there"),
    ],
)
def test_a_host_that_cannot_build_is_refused(tmp_path, wheels, python, has_nvcc, message):
    cuda, fake = tmp_path / "cuda", tmp_path / "python"
    fake.write_text(f"#!/bin/sh\n{python}\n")
    fake.chmod(0o755)
    if has_nvcc:
        (cuda / "bin").mkdir(parents=True)
        (cuda / "bin/nvcc").touch(mode=0o755)
    code, said = run(str(wheels), PYTHON=str(fake) if python else "no-such-python", CUDA_HOME=str(cuda))
    assert code == 2
    assert message.format(cuda=cuda) in said
