"""Write down the parameters and checkpoint keys of Transformer Engine's layers, for the contract tests.

    PYTHONPATH=. VENV/bin/python scripts/record_transformer_engine.py

VENV has Transformer Engine. No GPU is needed, but a C++ compiler is: the models are built on fake CUDA
tensors (`tests/integration/fake_cuda.py`). Writes tests/contract/transformer_engine-<version>.json.
"""

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "integration")]

import torch  # noqa: E402
from fake_cuda import fake_cuda, run_python  # noqa: E402
from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedObject, apply_factories  # noqa: E402
from transformers import Qwen2Config, Qwen3Config  # noqa: E402

from nemo_grpo.engine.megatron import parallel  # noqa: E402
from nemo_grpo.engine.megatron.model import build_model, transformer_config  # noqa: E402
from nemo_grpo.engine.megatron.optimizer import SHARDING  # noqa: E402
from nemo_grpo.families import read_spec  # noqa: E402
from nemo_grpo.recipe.layout import Layout  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 500,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
MOE = {"num_moe_experts": 4, "moe_ffn_hidden_size": 128, "moe_grouped_gemm": True}
MODELS: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "qwen2-tp1": (Qwen2Config(**SIZES, tie_word_embeddings=True), 1, {}),
    "qwen2-tp2": (Qwen2Config(**SIZES, tie_word_embeddings=True), 2, {}),
    "qwen3-tp1": (Qwen3Config(**SIZES, tie_word_embeddings=False), 1, {}),
    "qwen3-tp2": (Qwen3Config(**SIZES, tie_word_embeddings=False), 2, {}),
    "qwen3_moe-tp1": (Qwen3Config(**SIZES, tie_word_embeddings=False), 1, MOE),
}
"""Hugging Face config, tensor-parallel size, further fields of `TransformerConfig`."""


def model_of(hf: Any, tensor_parallel: int, fields: dict[str, Any]) -> dict[str, Any]:
    """Parameters of rank 0, names of its other states, and what a checkpoint has of the whole model.

    Returns: parameters: name -> shape.  extra_states: names.  checkpoint: key -> shape; every shard of an
             object, without shape.
    """
    with fake_cuda(tensor_parallel):
        layout = Layout(tensor=tensor_parallel, sequence_parallel=tensor_parallel > 1)
        parallel.initialize(layout, torch.device("cuda", 0), seed=0)
        spec = read_spec(hf.to_dict())
        config = transformer_config(spec, layout, torch.bfloat16, **fields)
        if config.transformer_impl != "transformer_engine":
            raise SystemExit("megatron-core finds no Transformer Engine in this environment")
        model = build_model(spec, config)
        state = model.sharded_state_dict(metadata=SHARDING)
        extra_states = sorted(name for name in state if name.endswith("._extra_state"))
        apply_factories(state)
        return {
            "parameters": {name: list(x.shape) for name, x in model.named_parameters()},
            "extra_states": extra_states,
            "checkpoint": dict(sorted(map(_key_and_shape, nested_values(state)))),
        }


def _key_and_shape(part: Any) -> tuple[str, list[int] | None]:
    if isinstance(part, ShardedObject):
        return part.unique_key, None
    return part.key, list(part.global_shape)


def recorded() -> dict[str, Any]:
    """What is recorded."""
    return {
        "transformer_engine": version("transformer_engine"),
        "megatron_core": version("megatron-core"),
        "sizes": SIZES,
        "models": {name: model_of(*how) for name, how in MODELS.items()},
    }


def main() -> None:
    if "FAKE_CUDA_GUARD" in os.environ:
        print(json.dumps(recorded()))
        return
    found = run_python([__file__])
    path = ROOT / "tests" / "contract" / f"transformer_engine-{found['transformer_engine']}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
