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
        value = getattr(importlib.import_module(self._name), attribute)
        # Python calls __getattr__ only for attributes that it does not find: the next use is a plain look-up.
        setattr(self, attribute, value)
        return value


if TYPE_CHECKING:
    import torch as torch
    from torch import Tensor as Tensor
else:
    torch = LazyModule("torch")
    Tensor = Any
