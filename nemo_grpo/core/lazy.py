"""``torch``, imported on first use, and ``Tensor`` for annotations.

Configurations, rules and the planner need the variants' classes but no tensor, and torch takes seconds to
import. Modules that use torch inside functions only therefore write
``from nemo_grpo.core.lazy import Tensor, torch``.
"""

import importlib
from typing import TYPE_CHECKING, Any


class LazyModule:
    """Stands for a module until one of its attributes is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        found = getattr(importlib.import_module(self._name), attribute)
        setattr(self, attribute, found)  # later uses find it without asking for the module, which takes time
        return found


if TYPE_CHECKING:
    import torch as torch
    from torch import Tensor as Tensor
else:
    torch = LazyModule("torch")
    Tensor = Any
