"""`recipe check` asks what the embedded engine's model builder refuses."""

import pytest
from small_models import small_config
from typer.testing import CliRunner

from nemo_grpo.cli import app


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("qwen2", {}, None),
        ("llama3-rope", {}, None),
        ("qwen2", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ("qwen2", {"hidden_act": "relu2"}, "hidden_act='relu2' is not supported"),
        (
            "qwen2",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope scaling 'dynamic' is not supported",
        ),
        ("mistral", {"sliding_window": 16}, "sliding_window=16 is not supported"),
    ],
)
def test_what_the_model_builder_refuses_is_refused_at_check(family, change, message, tmp_path):
    small_config(family, **change).save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    architecture = {"qwen2": "Qwen2", "llama3-rope": "Llama", "mistral": "Mistral"}[family]
    text = config.read_text().replace("{", f'{{"architectures": ["{architecture}ForCausalLM"],', 1)
    config.write_text(text)
    for name, text in (("model.safetensors", ""), ("tokenizer.json", "{}")):
        (tmp_path / name).write_text(text)
    overrides = [f"policy.model_name={tmp_path}"]
    result = CliRunner().invoke(app, ["recipe", "check", "recipes/quickstart.yaml", *overrides])
    if message is None:
        assert "is not supported" not in result.output
    else:
        assert message in " ".join(result.output.split())
        assert result.exit_code == 2
        assert "NeMo-RL (nemo-grpo launch)" in " ".join(result.output.split())
        assert "config.json" not in result.output
