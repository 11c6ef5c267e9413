"""The policy on megatron-core. The only place of the embedded engine that imports megatron."""

import warnings

with warnings.catch_warnings():
    # On import megatron-core warns five times that it found no Transformer Engine; the engine says it once
    # itself.
    warnings.simplefilter("ignore")
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel  # noqa: F401
