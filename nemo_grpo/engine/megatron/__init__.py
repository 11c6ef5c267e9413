"""The policy on megatron-core. No other part of the embedded engine imports megatron."""

import warnings
from contextlib import ExitStack
from unittest import mock

import torch

# Workarounds of megatron-core 0.16 to 0.19 (tests/unit/engine/test_upstream_faults.py).
with ExitStack() as _importing:
    # On import megatron-core warns five times that Transformer Engine is missing. The engine warns once
    # itself.
    _importing.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")
    if not torch.cuda.is_available():
        # megatron-core also passes its fused functions to torch.compile, which loads the whole compiler. The
        # layers for the CPU (`layers`) use none of these functions.
        _importing.enter_context(mock.patch("torch.compile", lambda function, **_: function))
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel  # noqa: F401
