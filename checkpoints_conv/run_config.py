"""The files by which Megatron-Bridge and NeMo-RL recognise a checkpoint and build its model."""

from __future__ import annotations

import logging
import struct
from pathlib import Path
from typing import Any

from checkpoints_conv.archive import save, tensor_reference
from checkpoints_conv.dtypes import DTYPES, Dtype
from checkpoints_conv.families import Family
from checkpoints_conv.locate import RUN_CONFIG
from checkpoints_conv.torch_dist import LATEST

log = logging.getLogger(__name__)

# What megatron-core computes with wherever rope_scaling is true.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_PROVIDER = "megatron.bridge.models.gpt_provider.GPTModelProvider"


def write_bridge_files(folder: Path, family: Family, dtype: Dtype, iteration: int) -> None:
    """Write run_config.yaml, train_state.pt and the trackers that name the latest iteration."""
    inner = folder / f"iter_{iteration:07d}"
    for lost in unsaid(family.config):
        log.warning("%s of config.json is not in %s: a model built from that alone differs", lost, RUN_CONFIG)
    (inner / RUN_CONFIG).write_text(to_yaml({"model": model_section(family, dtype), **_run_sections()}))
    (folder / LATEST).write_text(str(iteration))
    for path in (inner / "train_state.pt", folder / "latest_train_state.pt"):
        _write_train_state(path, iteration)


def _run_sections() -> dict[str, Any]:
    return {"checkpoint": {"save_optim": False, "save_rng": False, "fully_parallel_save": False}}


def _write_train_state(path: Path, iteration: int) -> None:
    """A dict of scalar tensors."""
    counters = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
    scalars = {
        "step": ("int64", struct.pack("<q", iteration)),
        **{name: ("int64", struct.pack("<q", 0)) for name in counters},
        "floating_point_operations_so_far": ("float64", struct.pack("<d", 0.0)),
        **{name: ("bool", struct.pack("<?", False)) for name in ("do_train", "do_valid", "do_test")},
    }
    tree = {name: tensor_reference(DTYPES[dtype], (), name) for name, (dtype, _) in scalars.items()}
    with path.open("wb") as stream:
        save(stream, tree, {name: [data] for name, (_, data) in scalars.items()})


def unsaid(config: dict[str, Any]) -> list[str]:
    """What shapes the model's attention, and `model_section` has no words for."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind, found = rope.get("rope_type", rope.get("type")) or "default", []
    if kind not in ("default", "llama3"):
        found.append(f"rope_type {kind}")
    if kind == "llama3":
        given = {key: rope.get(key, value) for key, value in _LLAMA3_ROPE.items()}
        found += [f"{key} {value:g}" for key, value in given.items() if value != _LLAMA3_ROPE[key]]
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        found.append(f"sliding_window {config['sliding_window']}")
    return found


def model_section(family: Family, dtype: Dtype) -> dict[str, Any]:
    """What Megatron-Bridge's provider needs to build the model, from config.json."""
    config, dims = family.config, family.dims
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    names = {entry.megatron for entry in family.entries}
    return {
        "_target_": _PROVIDER,
        "num_layers": family.num_layers,
        "hidden_size": dims["h"],
        "ffn_hidden_size": config.get("intermediate_size", dims["f"]),
        "num_attention_heads": config["num_attention_heads"],
        "num_query_groups": dims["groups"],
        "kv_channels": dims["d"],
        "vocab_size": dims["v"],
        "seq_length": config.get("max_position_embeddings", 4096),
        "share_embeddings_and_output_weights": family.tied,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.get("rms_norm_eps", 1e-6),
        "init_method_std": config.get("initializer_range", 0.02),
        "gated_linear_unit": True,
        "activation_func": _reference("torch.nn.functional.silu"),
        "add_bias_linear": False,
        "add_qkv_bias": any(name.endswith("linear_qkv.bias") for name in names),
        "qk_layernorm": any(name.endswith("q_layernorm.weight") for name in names),
        "hidden_dropout": 0.0,
        "attention_dropout": config.get("attention_dropout", 0.0),
        "position_embedding_type": "rope",
        "rotary_base": float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        "rotary_percent": 1.0,
        "rope_scaling": rope.get("rope_type", rope.get("type")) == "llama3",
        "rope_scaling_factor": float(rope.get("factor") or 1.0),
        "make_vocab_size_divisible_by": 1,
        "should_pad_vocab": False,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "params_dtype": _reference(str(dtype)),
        "pipeline_dtype": _reference(str(dtype)),
        "bf16": dtype.name == "bfloat16",
        "fp16": dtype.name == "float16",
        **(_experts(family) if dims["e"] else {}),
    }


def _experts(family: Family) -> dict[str, Any]:
    config = family.config
    return {
        "num_moe_experts": family.dims["e"],
        "moe_ffn_hidden_size": family.dims["f"],
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_router_pre_softmax": not config.get("norm_topk_prob", False),
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": config.get("router_aux_loss_coef", 0.001),
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
    }


def _reference(name: str) -> dict[str, Any]:
    """A Python object by name, as Megatron-Bridge writes it."""
    return {"_target_": name, "_call_": False}


def to_yaml(tree: dict[str, Any], indent: int = 0) -> str:
    """Nested dicts of plain values as block YAML; the subset that every YAML reader agrees on."""
    lines = []
    for key, value in tree.items():
        if isinstance(value, dict):
            lines.append(f"{' ' * indent}{key}:\n{to_yaml(value, indent + 2)}")
        else:
            lines.append(f"{' ' * indent}{key}: {_scalar(value)}\n")
    return "".join(lines)


def _scalar(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and "e" in (text := repr(value)) and "." not in text:
        mantissa, _, exponent = text.partition("e")  # YAML 1.1 takes 1e-06 for a string
        return f"{mantissa}.0e{exponent}"
    return "null" if value is None else str(value)
