"""Lets the processes of tests/vllm/test_images.py import torchvision's Python code."""

from nemo_grpo.rehearsal.torchvision_names import install

install()
