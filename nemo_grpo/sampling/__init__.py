"""Sampling of responses to prompts, for training and evaluation. Nothing here needs Megatron.

requests              requests, rollouts, and the generator's protocol
draws                 draws a token from logits; random numbers that belong to a response
local_generator       the loop around a model on this device, which has two implementations:
generate_decoder      - our decoder (`decoder/`), the default
generate_hf           - transformers, for all other models
generate_vllm         vLLM, for evaluation
generators            chooses the local one for a model; joins those of all ranks
episodes              whole responses, in one go or in turns with an environment
images                images of prompts, for vLLM
"""
