"""Lets torchvision's Python code load without its compiled operations, whose wheel is built for CUDA.

Image processors use the Python code alone. The two names are what torchvision registers functions for when it
is imported; nobody calls them.
"""

import sys
from importlib.abc import MetaPathFinder


class Names(MetaPathFinder):
    """Declares the operations right before torchvision is imported."""

    library = None

    def find_spec(self, name, path, target=None):
        if name == "torchvision" and Names.library is None:
            import torch

            Names.library = torch.library.Library("torchvision", "DEF")
            for operation in ("nms", "qnms"):
                Names.library.define(f"{operation}(Tensor dets, Tensor scores, float threshold) -> Tensor")


sys.meta_path.insert(0, Names())
