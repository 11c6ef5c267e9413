"""NeMo-RL's Megatron modules imported where there is no GPU; a plain module, for spawned ranks to use.

megatron-core is the real one. Packages that only a GPU host has are empty modules whose names are classes.
"""

import importlib
import sys

import newer_python  # noqa: F401
from rehearsal_hooks import EmptyModules

from nemo_grpo.rehearsal.megatron import add_newer_names

ABSENT = ("megatron.bridge", "transformer_engine", "modelopt", "nvidia_resiliency_ext", "vllm", "sglang")
WORKER = "nemo_rl.models.policy.workers.megatron_policy_worker"


def install():
    """Make the imports possible, once per process."""
    if any(isinstance(finder, EmptyModules) for finder in sys.meta_path):
        return
    importlib.import_module("megatron.core")  # decides for itself that there is no Transformer Engine
    add_newer_names(importlib.import_module("megatron.core.distributed.fsdp.mcore_fsdp_adapter"))
    sys.meta_path.insert(0, EmptyModules(ABSENT, importer=""))


def stock_worker():
    install()
    return importlib.import_module(WORKER)


def our_worker():
    install()
    return importlib.import_module("nemo_grpo.nemorl.worker")
