"""Hold what a loss detaches: of that loss the gradient with a stop-gradient is the derivative."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nemo_grpo.core.lazy import torch


class Held:
    """Records what ``detach()`` and code under ``no_grad`` give in the first call; later calls get the same.

    The calls must take the same way through the code.
    """

    def __init__(self, *, active: bool = True) -> None:
        self.active = active
        self._values: list[Any] | None = None

    @contextmanager
    def again(self) -> Iterator[None]:
        """One call of the loss."""
        if not self.active:
            yield
            return
        recorded: list[Any] = []
        earlier = self._values

        from torch.overrides import TorchFunctionMode

        stopping = (torch.Tensor.detach, torch.Tensor.data.__get__)  # type: ignore[attr-defined]

        class Mode(TorchFunctionMode):  # a class of torch's, which is imported on first use
            def __torch_function__(
                self, function: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                result = function(*args, **(kwargs or {}))
                stops = function in stopping or not torch.is_grad_enabled()
                if not (stops and isinstance(result, torch.Tensor)):
                    return result
                place = len(recorded)
                recorded.append(result.clone())
                return result if earlier is None else earlier[place].clone()

        with Mode():
            yield
        if self._values is None:
            self._values = recorded
