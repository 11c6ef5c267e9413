"""A dense decoder for sampling: plain torch, fused weights, a cache that is written in place.

    weights   storage under Hugging Face names, from the converters' family tables
    rotary    rotary position embeddings
    prompts   as streams of tokens without padding
    cache     keys and values of the responses that are going, and attention over them
    model     the forward pass, for whole prompts and for one token of every response

What it leaves out of a transformers model is what a training loop's sampler never asks for: modules, hooks,
masks for every length, padding. Models of other families are sampled by `generate_hf`.
"""
