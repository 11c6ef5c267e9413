"""The command line: what it prints, what it returns."""

import json
import re
import shutil

import pytest
from conv_models import rewrite, tensors_of
from small_models import YARN
from typer.testing import CliRunner

from checkpoints_conv.hf_to_megatron import hf_to_megatron
from nemo_grpo import UserError
from nemo_grpo.cli.convert import app, num_bytes

runner = CliRunner()


def run(*args):
    return runner.invoke(app, [str(arg) for arg in args])


def test_both_directions_verify_and_inspect(hf_models, tmp_path):
    source, megatron, back = hf_models("qwen3"), tmp_path / "megatron", tmp_path / "back"
    assert run("hf-to-megatron", "--hf-model", source, "--output", megatron).exit_code == 0
    options = ["--megatron-checkpoint", megatron, "--hf-config", source, "--output", back, "--dtype", "bf16"]
    result = run("megatron-to-hf", *options, "--max-shard-size", "20KB", "--sha256", "--workers", "1")
    assert result.exit_code == 0
    result = run("verify", "--hf-model", source, "--megatron-checkpoint", megatron)
    assert result.exit_code == 0
    assert f"{len(tensors_of(source))} tensors compared, 0 differ" in result.output
    result = run("verify", "--hf-model", back, "--megatron-checkpoint", megatron)
    assert result.exit_code == 1  # bf16 is not the checkpoint's fp32
    assert "torch.bfloat16 tensors were compared after conversion to torch.float32" in result.output
    result = run("inspect", megatron, "--tensors")
    assert "decoder.layers.mlp.linear_fc1.weight" in result.output
    assert "[4, 128, 32]" in result.output
    assert "Qwen3ForCausalLM" in run("inspect", back).output


def test_results_are_printed_as_json(hf_models, megatron_checkpoints, tmp_path):
    """qwen3: 4 layers; embedding and output 96 x 32 each, and what the safetensors library counts."""
    source, megatron = hf_models("qwen3"), megatron_checkpoints("qwen3")
    tensors = tensors_of(source)
    num_parameters = sum(tensor.numel() for tensor in tensors.values())
    found = json.loads(run("inspect", source, "--json").output)
    assert found == {
        "format": "Hugging Face safetensors",
        "num_files": 1,
        "num_tensors": len(tensors),
        "num_parameters": num_parameters,
        "num_bytes": 4 * num_parameters,
        "dtypes": {"float32": len(tensors)},
        "architectures": ["Qwen3ForCausalLM"],
        "convertible": True,
        "has_sha256sums": False,
    }
    found = json.loads(run("inspect", megatron, "--json", "--tensors").output)
    assert (found["num_parameters"], found["has_run_config"]) == (num_parameters, True)
    assert found["other_state"] == {"num_tensors": 0, "num_bytes": 0}
    size = {"shape": [4, 128, 32], "dtype": "float32", "num_bytes": 4 * 4 * 128 * 32}
    assert {"name": "decoder.layers.mlp.linear_fc1.weight"} | size in found["tensors"]
    options = ["verify", "--hf-model", source, "--megatron-checkpoint", megatron, "--json"]
    nothing = {"different": {}, "rounded": {}, "cast": [], "num_hashed": 0}
    assert json.loads(run(*options).output) == {"num_tensors": len(tensors)} | nothing
    other = shutil.copytree(source, tmp_path / "other")
    rewrite(other, lambda tensors: tensors["model.norm.weight"].add_(0.5))
    options[2] = other
    result = run(*options)
    assert result.exit_code == 1
    assert json.loads(result.output)["different"] == {"model.norm.weight": pytest.approx(0.5, abs=1e-6)}


def test_mistakes_are_user_errors(hf_models, tmp_path):
    source = hf_models("qwen3")
    result = run("hf-to-megatron", "--hf-model", source, "--output", tmp_path / "x", "--dtype", "bf61")
    assert isinstance(result.exception, UserError)
    assert "did you mean 'bf16'" in str(result.exception)
    result = run("inspect", tmp_path)
    assert isinstance(result.exception, UserError)
    assert "holds no torch_dist checkpoint" in str(result.exception)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("qwen3-moe", "Qwen3MoeForCausalLM is not supported"),
        ("yarn", "rope scaling .*yarn.* is not supported"),
    ],
)
def test_logits_that_cannot_be_compared_are_refused_before_the_tensors(family, reason, hf_models, tmp_path):
    model = hf_models("qwen3" if family == "yarn" else family)
    megatron = hf_to_megatron(model, tmp_path / "megatron")
    if family == "yarn":
        model = shutil.copytree(model, tmp_path / "model")
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"rope_scaling": YARN}))
    result = run("verify", "--hf-model", model, "--megatron-checkpoint", megatron, "--logits")
    assert re.match(rf"--logits: .*{reason}.*; leave --logits out", str(result.exception))
    assert "differ" not in result.output


@pytest.mark.parametrize(
    "command",
    [
        "hf-to-megatron --output x --hf-model",
        "verify --megatron-checkpoint x --hf-model",
        "megatron-to-hf --megatron-checkpoint x --output y --hf-config",
        "megatron-to-hf --megatron-checkpoint x --output y --lora merge --base",
    ],
)
def test_a_name_on_the_hub_is_answered_with_its_download(command):
    error = run(*command.split(), "Qwen/Qwen3-8B").exception
    assert isinstance(error, UserError)
    assert "`hf download Qwen/Qwen3-8B --local-dir DIR`" in str(error)


def test_sizes():
    assert list(map(num_bytes, ("5GB", "500 mb", "1.5GiB", "7B"))) == [5 * 10**9, 5 * 10**8, 3 * 2**29, 7]
    for text in ("5", "0GB", "GB", "-1GB", "5XB"):
        with pytest.raises(UserError, match="write it like 5GB or 500MB"):
            num_bytes(text)
