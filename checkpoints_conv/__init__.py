"""Convert checkpoints between Hugging Face and Megatron, tensor by tensor, without building a model."""
