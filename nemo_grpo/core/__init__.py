"""The mathematics: plain functions of tensors. Imports torch and the standard library, nothing else."""
