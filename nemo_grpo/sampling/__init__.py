"""Responses to prompts, without megatron: what training and evaluation both stand on.

requests              what is asked of a generator, what comes back, and the generator's protocol
prompting             problems as token ids
draws                 a token from logits; random numbers that belong to a response
local_generator       the loop around a model on this device, for
generate_decoder      - the own decoder (`decoder/`), the default
generate_hf           - transformers, for all other models
generate_vllm         vLLM, for evaluation
generate_distributed  any of them, shared between ranks
generators            which of the local ones takes a model
episodes              whole responses, in one go or in turns with an environment
"""
