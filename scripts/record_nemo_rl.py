"""Write down NeMo-RL's interface as far as `nemo_grpo.nemorl` uses it, for the contract tests.

    NEMO_RL_SRC=DIR PYTHONPATH=. .venv-nemo-rl/bin/python scripts/record_nemo_rl.py

Writes tests/contract/nemo_rl-<version>.json: names, signatures and keys, nothing of NeMo-RL's code.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [os.environ["NEMO_RL_SRC"], str(ROOT / "tests" / "nemo_rl")]

import newer_python  # noqa: E402, F401

from nemo_grpo.nemorl import compat  # noqa: E402

FUNCTIONS = ("setup", "grpo_train", "async_grpo_train", "dynamic_sampling", "_create_advantage_estimator")


def calls(module: Any, method: str) -> list[list[str]]:
    """Keyword names of every call of a method within a module."""
    tree = ast.parse(inspect.getsource(module))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = [node for node in found if isinstance(node.func, ast.Attribute) and node.func.attr == method]
    return [[keyword.arg or "**" for keyword in node.keywords] for node in named]


def setup_arity(module: Any) -> int:
    """How many values `setup` returns."""
    tree = ast.parse(inspect.getsource(module.setup))
    returns = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    return max(len(value.elts) for value in returns if isinstance(value, ast.Tuple))


def interface() -> dict[str, Any]:
    """What is recorded."""
    grpo = importlib.import_module("nemo_rl.algorithms.grpo")
    sft = importlib.import_module("nemo_rl.algorithms.sft")
    loss = compat.import_name("nemo_rl.algorithms.loss.loss_functions:ClippedPGLossFn")
    config = compat.import_name("nemo_rl.algorithms.loss.loss_functions:ClippedPGLossConfig")
    return {
        "names": sorted(name for name in compat.NAMES if compat.has_name(name)),
        "signatures": {name: list(inspect.signature(getattr(grpo, name)).parameters) for name in FUNCTIONS},
        "loss_call": list(inspect.signature(loss.__call__).parameters)[1:],
        "loss_keys": sorted(config.model_fields),
        "advantage_calls": calls(grpo, "compute_advantage"),
        "train_calls": calls(grpo, "train"),
        "setup_arity": setup_arity(grpo),
        "sft_train": list(inspect.signature(sft.sft_train).parameters),
        "sft_settings": sorted(sft.SFTConfig.model_fields),
        "sft_setup_arity": setup_arity(sft),
    }


def main() -> None:
    version = compat.version()
    path = ROOT / "tests" / "contract" / f"nemo_rl-{version}.json"
    path.write_text(json.dumps(interface(), indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
