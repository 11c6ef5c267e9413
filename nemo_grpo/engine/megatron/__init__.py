"""The policy on megatron-core. The only place of the embedded engine that imports megatron."""

import warnings
from contextlib import ExitStack
from unittest import mock

import torch

# Workarounds of megatron-core 0.16 to 0.19 (tests/unit/engine/test_upstream_faults.py).
with ExitStack() as _importing:
    # On import megatron-core warns five times that it found no Transformer Engine; the engine warns once.
    _importing.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")
    if not torch.cuda.is_available():
        # It also hands its fused functions to torch.compile, which loads the whole compiler. The layers that
        # the CPU gets (`layers`) use none of them.
        _importing.enter_context(mock.patch("torch.compile", lambda function, **_: function))
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel  # noqa: F401
