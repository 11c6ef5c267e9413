"""Responses to prompts, without megatron: for training and evaluation.

requests              requests, rollouts, and the generator's protocol
draws                 a token from logits; random numbers that belong to a response
local_generator       the loop around a model on this device, for
generate_decoder      - the own decoder (`decoder/`), the default
generate_hf           - transformers, for all other models
generate_vllm         vLLM, for evaluation
generators            which of the local ones takes a model; one for all ranks
episodes              whole responses, in one go or in turns with an environment
"""
