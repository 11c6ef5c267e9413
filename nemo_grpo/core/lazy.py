"""``torch``, imported on first use, and ``Tensor`` for annotations.

Configurations, rules and the planner need the variants' classes but no tensors, and torch takes seconds to
import. Modules that use torch only inside functions therefore write
``from nemo_grpo.core.lazy import Tensor, torch``.
"""

import importlib
from typing import TYPE_CHECKING, Any


class LazyModule:
    """Imports a module when one of its attributes is first used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        found = getattr(importlib.import_module(self._name), attribute)
        setattr(self, attribute, found)  # later uses do not come here
        return found


if TYPE_CHECKING:
    import torch as torch
    from torch import Tensor as Tensor
else:
    torch = LazyModule("torch")
    Tensor = Any
