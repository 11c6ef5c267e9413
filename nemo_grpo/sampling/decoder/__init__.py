"""A dense decoder for sampling: plain torch, fused weights, a cache that is written in place.

    weights   storage under Hugging Face names, and matrix products
    rotary    rotary position embeddings
    prompts   prompts as streams of tokens without padding
    cache     keys and values of unfinished responses, and attention over them
    model     forward pass, for whole prompts and for one token of every response

A step of sampling is many small operations, so the modules, hooks, masks and padding of a transformers model
would cost much of its time. `generate_hf` samples models that this decoder does not know.
"""
