"""The decoder's matrix products: torch's, or oneDNN's with weights that are packed once per update.

Sampling multiplies few rows, and then a product's time is the reading of its weights. torch lays them out
anew for every product.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_grpo.support import processor

SMALLEST = 2**18
"""Values of a weight from which on packing pays: oneDNN takes longer to begin a product."""


def packs(weight: Tensor) -> bool:
    """True if this weight is to be packed; the processor's identity decides, so a resumed run agrees."""
    if weight.device.type != "cpu" or weight.numel() < SMALLEST or not torch.backends.mkldnn.is_available():
        return False
    computes = weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and processor.has_bf16())
    return computes and processor.packs_weights()


class Matrix:
    """x -> x W^T + b, with W [out, in] and b [out] or None in memory that others write.

    While it is packed W's own memory is given back, unless ``shared``: something else reads W too.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, shared: bool = False) -> None:
        self.weight, self.bias = weight, bias
        self._shared, self._num_bytes = shared, weight.untyped_storage().nbytes()
        self._packed: Tensor | None = None

    def pack(self) -> None:
        """Take W as it is now, where that is faster."""
        if not packs(self.weight):
            return
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight)
        if not self._shared:
            self.weight.untyped_storage().resize_(0)

    def unpack(self) -> None:
        """Make W's memory writable; what it holds is not defined."""
        self._packed = None
        self.weight.untyped_storage().resize_(self._num_bytes)

    def __call__(self, x: Tensor) -> Tensor:
        """[N, in] -> [N, out]."""
        if self._packed is None:
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")

    def plus(self, residual: Tensor, x: Tensor) -> Tensor:
        """[N, out]: residual [N, out] + the product with x [N, in]; of a matrix without bias."""
        if self._packed is None:
            return torch.addmm(residual, x, self.weight.T)
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._packed, None, "add")
