"""Files beside the weights that Megatron-Bridge and NeMo-RL need to find a checkpoint and build its model."""

import logging
import struct
from pathlib import Path
from typing import Any

import yaml

from checkpoints_conv.formats.archive import TensorReference, save
from checkpoints_conv.formats.dtypes import DTYPES, Dtype
from checkpoints_conv.formats.torch_dist import LATEST
from nemo_grpo.models import Family
from nemo_grpo.support.errors import UserError, reading
from nemo_grpo.support.nemo_folder import model_yaml

log = logging.getLogger(__name__)

RUN_CONFIG = "run_config.yaml"
COMPARED = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "vocab_size": "vocab_size",
    "layernorm_epsilon": "rms_norm_eps",
    "activation_func": "hidden_act",
    "add_qkv_bias": "attention_bias",
    "qk_layernorm": "model_type",
    "rotary_base": "rope_theta",
    "rope_scaling": "rope_type",
    "rope_scaling_factor": "factor of rope_parameters",
    "num_moe_experts": "num_experts",
    "moe_router_topk": "num_experts_per_tok",
    "moe_router_num_groups": "n_group",
    "moe_router_group_topk": "topk_group",
    "moe_router_topk_scaling_factor": "routed_scaling_factor",
    "moe_layer_freq": "first_k_dense_replace",
    "rotary_scaling_factor": "factor of rope_parameters",
    "mscale": "mscale of rope_parameters",
    "mscale_all_dim": "mscale_all_dim of rope_parameters",
}
"""Keys that change the model's function: Megatron's -> config.json's."""
_ACTIVATIONS = {
    "silu": "torch.nn.functional.silu",
    "swish": "torch.nn.functional.silu",
    "gelu_pytorch_tanh": "megatron.core.activations.fast_gelu",
    "gelu": "torch.nn.functional.gelu",
}
"""config.json's activations -> functions of Megatron-Bridge's providers."""
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Values that megatron-core has built in for rope_scaling=true."""
_PROVIDER = "megatron.bridge.models.gpt_provider.GPTModelProvider"


def write_bridge_files(folder: Path, family: Family, dtype: Dtype, iteration: int) -> None:
    """Write run_config.yaml, train_state.pt and the trackers that name the latest iteration."""
    iteration_folder = folder / f"iter_{iteration:07d}"
    for setting in lost_settings(family):
        log.warning(
            "%s of config.json is not in %s: a model built from that alone differs", setting, RUN_CONFIG
        )
    # Megatron-Bridge demands these three keys, whatever it loads.
    saving = {"save_optim": False, "save_rng": False, "fully_parallel_save": False}
    sections = {"model": model_section(family, dtype), "checkpoint": saving}
    (iteration_folder / RUN_CONFIG).write_text(yaml.safe_dump(sections, sort_keys=False))
    (folder / LATEST).write_text(str(iteration))
    for path in (iteration_folder / "train_state.pt", folder / "latest_train_state.pt"):
        _write_train_state(path, iteration)


def _write_train_state(path: Path, iteration: int) -> None:
    """Write the counters of a training that has not begun, as tensors without axes."""
    zero = ("int64", struct.pack("<q", 0))
    false = ("bool", struct.pack("<?", False))
    scalars = {
        "step": ("int64", struct.pack("<q", iteration)),
        "consumed_train_samples": zero,
        "skipped_train_samples": zero,
        "consumed_valid_samples": zero,
        "floating_point_operations_so_far": ("float64", struct.pack("<d", 0.0)),
        "do_train": false,
        "do_valid": false,
        "do_test": false,
    }
    tree = {name: TensorReference(DTYPES[dtype], (), name) for name, (dtype, _) in scalars.items()}
    data = {name: [content] for name, (_, content) in scalars.items()}
    with path.open("wb") as stream:
        save(stream, tree, data)


def lost_settings(family: Family) -> list[str]:
    """List the settings of config.json that run_config.yaml cannot express, as "key value"."""
    rope = family.spec.rope
    lost = [f"{key} {value:g}" for key, value in family.lost_settings.items()]

    expressed_rope_types = {"default", "llama3"}
    if "rope_scaling_factor" in family.settings:
        expressed_rope_types.add("linear")
    if family.settings.keys() & {"rotary_scaling_factor", "yarn_rotary_scaling_factor"}:
        expressed_rope_types.add("yarn")
    if rope["rope_type"] not in expressed_rope_types:
        lost.append(f"rope_type {rope['rope_type']}")
    if rope["rope_type"] == "llama3":
        for key, fixed_value in _LLAMA3_ROPE.items():
            value = rope.get(key, fixed_value)
            if value != fixed_value:
                lost.append(f"{key} {value:g}")

    if family.spec.sliding_window and "window_size" not in family.settings:
        lost.append(f"sliding_window {family.spec.sliding_window}")
    return lost


def check_run_config(family: Family, path: Path) -> None:
    """Refuse a checkpoint whose model settings differ from config.json's. Shapes do not show all of them.

    Args:
        family: the model of config.json.
        path: path of run_config.yaml. If it does not exist, NeMo's model.yaml is compared, if that exists.
    """
    section = "model"
    compared = dict(COMPARED)
    if not path.exists():
        path = model_yaml(path.parent)
        section = "config"
        # NeMo's vocabulary may be padded.
        del compared["vocab_size"]
    settings = read_section(path, section)
    expected_settings = model_section(family, DTYPES["float32"])
    if not expected_settings["rope_scaling"]:
        # Without rope_scaling the factor has no effect.
        del expected_settings["rope_scaling_factor"]
    for key, hf_key in compared.items():
        value = _plain(settings.get(key))
        expected = _plain(expected_settings.get(key))
        # A key that one side leaves out has that side's default, which is not known here.
        if value is not None and expected is not None and value != expected:
            raise UserError(
                f"{path.name} has {key}={_shortened(value)}, config.json gives {expected} ({hf_key}); are "
                "the checkpoint and config.json of the same model?"
            )


def _plain(value: Any) -> Any:
    """Simplify a setting, so that two of them can be compared.

    A function becomes its name. A text such as 1e-06, which YAML 1.1 does not read as a number, becomes one.
    """
    if isinstance(value, dict):
        return value.get("_target_")
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _shortened(value: Any) -> str:
    """Shorten a value for a message, because even a short YAML file can expand to a very long value."""
    if isinstance(value, list):
        if any(isinstance(item, list) for item in value):
            return "lists within lists"
        return f"[{', '.join(map(_shortened, value[:8]))}]"
    if isinstance(value, int) and value.bit_length() > 200:
        # Python refuses to print a very long number.
        return "a number of many digits"
    if isinstance(value, str | int | float):
        return str(value)[:60]
    return type(value).__name__


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses merge keys, with which a short file can expand to any size."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
            raise yaml.constructor.ConstructorError(None, None, "merge keys are not read", node.start_mark)


def read_section(path: Path, section: str) -> dict[str, Any]:
    """Read a section of a YAML file; empty if there is no such file or section."""
    remedy = "restore it, or remove it to convert without it"
    with reading(path, "valid YAML", remedy, yaml.YAMLError):
        sections = yaml.load(path.read_text(), _Loader) if path.exists() else None
    content = sections.get(section) if isinstance(sections, dict) else sections
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"{path}: {section} is not a mapping; {remedy}")
    return content


def model_section(family: Family, dtype: Dtype) -> dict[str, Any]:
    """Build the section ``model`` of run_config.yaml, from which Megatron-Bridge builds the model."""
    config = family.config
    spec = family.spec
    if spec.hidden_act not in _ACTIVATIONS:
        raise UserError(
            f"hidden_act={spec.hidden_act!r} of config.json is not one of {', '.join(_ACTIVATIONS)}"
        )
    settings = {
        "_target_": _PROVIDER,
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "ffn_hidden_size": config.get("intermediate_size", spec.ffn_size),
        "num_attention_heads": spec.num_attention_heads,
        "num_query_groups": spec.num_key_value_heads,
        "kv_channels": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "seq_length": spec.max_position_embeddings,
        "share_embeddings_and_output_weights": spec.tied_embeddings,
        "normalization": "RMSNorm",
        "layernorm_epsilon": spec.norm_eps,
        "init_method_std": config.get("initializer_range", 0.02),
        "gated_linear_unit": True,
        "activation_func": _reference(_ACTIVATIONS[spec.hidden_act]),
        "add_bias_linear": False,
        "add_qkv_bias": spec.has_qkv_bias,
        "qk_layernorm": spec.has_qk_norm,
        "hidden_dropout": 0.0,
        "attention_dropout": config.get("attention_dropout", 0.0),
        "position_embedding_type": "rope",
        "rotary_base": spec.rope["rope_theta"],
        "rotary_percent": 1.0,
        "rope_scaling": spec.rope["rope_type"] == "llama3",
        "rope_scaling_factor": float(spec.rope.get("factor") or 1.0),
        # Rows are padded as the layout needs when the checkpoint is loaded, not in the checkpoint.
        "make_vocab_size_divisible_by": 1,
        "should_pad_vocab": False,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "params_dtype": _reference(str(dtype)),
        "pipeline_dtype": _reference(str(dtype)),
        "bf16": dtype.name == "bfloat16",
        "fp16": dtype.name == "float16",
    }
    if spec.num_experts:
        settings |= _expert_settings(family)
    return settings | family.settings


def _expert_settings(family: Family) -> dict[str, Any]:
    config = family.config
    spec = family.spec
    return {
        "num_moe_experts": spec.num_experts,
        "moe_ffn_hidden_size": spec.ffn_size,
        "moe_router_topk": spec.num_experts_per_token,
        "moe_router_pre_softmax": not config.get("norm_topk_prob", False),
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": config.get("router_aux_loss_coef", 0.001),
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
    }


def _reference(name: str) -> dict[str, Any]:
    """Name a function or dtype in the form that Megatron-Bridge reads without calling it."""
    return {"_target_": name, "_call_": False}
