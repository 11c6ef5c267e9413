"""A dense decoder for sampling: plain torch, fused weights, a cache that is written in place.

    weights   storage under Hugging Face names, and matrix products
    rotary    rotary position embeddings
    prompts   prompts as streams of tokens without padding
    cache     keys and values of unfinished responses, and attention over them
    model     forward pass, for whole prompts and for one token of every response

A training loop's sampler needs none of a transformers model's modules, hooks, masks and padding. Models of
other families are sampled by `generate_hf`.
"""
