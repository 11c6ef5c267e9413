"""torchvision's Python code without its compiled operations, whose wheel is built for CUDA.

Image processors of transformers use the Python code and one operation, which decodes a file; pillow replaces
it. The other operations are only declared: torchvision registers functions for them on import, and nobody
calls them.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

DECODER = "torchvision.io.image"
OPERATIONS = ("nms", "qnms")


class Names(MetaPathFinder):
    """Declares the operations right before torchvision is imported, and decodes for it."""

    library: ClassVar[Any] = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name == "torchvision" and Names.library is None:
            import torch

            # Kept, because the operations are gone with the library's object.
            Names.library = torch.library.Library("torchvision", "DEF")
            for operation in OPERATIONS:
                Names.library.define(f"{operation}(Tensor dets, Tensor scores, float threshold) -> Tensor")
        if name != DECODER:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            module.decode_image = decode_image  # type: ignore[attr-defined]

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def decode_image(input: Any, mode: Any, apply_exif_orientation: bool = False) -> Any:
    """Decode as torchvision does, for RGB alone.

    Args:
        input: uint8 tensor with a file's bytes, or its path.
        mode: "RGB", as a string or as torchvision's ImageReadMode.
        apply_exif_orientation: must be False.

    Returns:
        [3, height, width] uint8.
    """
    import numpy
    import torch
    from PIL import Image

    assert getattr(mode, "name", mode) == "RGB"
    assert not apply_exif_orientation
    source = BytesIO(input.numpy().tobytes()) if torch.is_tensor(input) else Path(input)
    with Image.open(source) as image:
        return torch.from_numpy(numpy.array(image.convert("RGB"))).permute(2, 0, 1).contiguous()


def install() -> None:
    """Put the finder into this process."""
    sys.meta_path.insert(0, Names())
