"""FP8 and matrix products of Transformer Engine's compiled extension, written with torch for the CPU.

After the C++ and CUDA sources of Transformer Engine 2.12 for Hopper: values are rounded to FP8 as there,
and the products of rounded values are summed in float32. What a GPU refuses (a missing transpose, a length
that is no multiple of 16) is refused here.
"""

import math
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

DType = IntEnum(
    "DType",
    "kByte kInt16 kInt32 kInt64 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat8E8M0 kFloat4E2M1",
    start=0,
)
TORCH = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
    DType.kFloat8E4M3: torch.float8_e4m3fn,
    DType.kFloat8E5M2: torch.float8_e5m2,
}
BLOCK = 128


class Refused(RuntimeError):
    """What the compiled extension or cuBLAS would refuse."""


def check(condition: bool, rule: str) -> None:
    if not condition:
        raise Refused(rule)


def quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    """The tensor in FP8, in ``output`` if that is given; nothing happens where ``noop`` is 1."""
    check(quantizer is not None, "quantize without a quantizer")
    if noop is not None and noop.item():
        return output
    name = type(quantizer).__name__
    x = tensor.detach().float()
    if name == "Float8BlockQuantizer":
        parts = _blocks(x, quantizer)
    else:
        check(name in ("Float8Quantizer", "Float8CurrentScalingQuantizer"), f"no kernel for {name} here")
        parts = _per_tensor(x, quantizer, current=name == "Float8CurrentScalingQuantizer")
    if output is None:
        return _wrapped(parts, tensor, quantizer)
    for attribute, value in parts.items():
        old = getattr(output, attribute)
        if old is not None and value is not None and old.shape == value.shape:
            old.copy_(value)
        else:
            setattr(output, attribute, value)
    if hasattr(output, "_transpose_invalid"):
        output._transpose_invalid = output._transpose is None
    return output


def _per_tensor(x: Tensor, quantizer: Any, current: bool) -> dict[str, Tensor | None]:
    most = torch.finfo(TORCH[quantizer.dtype]).max
    amax = x.abs().amax() if x.numel() else x.new_zeros(())
    if current:
        if quantizer.with_amax_reduction:
            torch.distributed.all_reduce(
                amax, torch.distributed.ReduceOp.MAX, group=quantizer.amax_reduction_group
            )
        scale = _scale_of(amax, most, quantizer.force_pow_2_scales, quantizer.amax_epsilon)
        quantizer.scale.copy_(scale)
    quantizer.amax.copy_(amax)
    data = _cast(x * quantizer.scale, quantizer.dtype)
    return {
        "_data": data if quantizer.rowwise_usage else None,
        "_transpose": fp8_transpose(data, quantizer.dtype) if quantizer.columnwise_usage else None,
        "_scale_inv": 1 / quantizer.scale.reshape(1),
    }


def _scale_of(amax: Tensor, most: float, power_of_2: bool, epsilon: float) -> Tensor:
    amax = amax.clamp(min=epsilon)
    scale = (most / amax).clamp(max=torch.finfo(torch.float32).max)
    if power_of_2:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    return torch.where((amax > 0) & amax.isfinite(), scale, torch.ones_like(scale))


def _cast(x: Tensor, dtype: DType) -> Tensor:
    most = torch.finfo(TORCH[dtype]).max
    return x.clamp(-most, most).to(TORCH[dtype]).view(torch.uint8)


def _blocks(x: Tensor, quantizer: Any) -> dict[str, Tensor | None]:
    """Rows and columns, each by themselves: blocks of 1 x 128 differ, those of 128 x 128 do not."""
    flat = x.reshape(-1, x.shape[-1])
    rows, cols = (_tiles(y, quantizer) for y in (flat, flat.t().contiguous()))
    turned = (x.shape[-1], *x.shape[:-1])
    return {
        "_rowwise_data": rows[0].reshape(x.shape) if quantizer.rowwise_usage else None,
        "_rowwise_scale_inv": rows[1] if quantizer.rowwise_usage else None,
        "_columnwise_data": cols[0].reshape(turned) if quantizer.columnwise_usage else None,
        "_columnwise_scale_inv": cols[1] if quantizer.columnwise_usage else None,
    }


def _tiles(x: Tensor, quantizer: Any) -> tuple[Tensor, Tensor]:
    """FP8 bytes [M, K]; inverse scales [K / 128, M] or, of square blocks, [M / 128, K / 128], padded to 4."""
    height = BLOCK if quantizer.block_scaling_dim == 2 else 1
    rows, cols = x.shape
    padded = functional.pad(x, (0, -cols % BLOCK, 0, -rows % height))
    tiled = padded.view(padded.shape[0] // height, height, padded.shape[1] // BLOCK, BLOCK)
    most = torch.finfo(TORCH[quantizer.dtype]).max
    amax = tiled.abs().amax((1, 3), keepdim=True)
    scale = _scale_of(amax, most, quantizer.force_pow_2_scales, quantizer.amax_epsilon)
    data = _cast(tiled * scale, quantizer.dtype).view(padded.shape)[:rows, :cols].contiguous()
    inverse = (1 / scale)[:, 0, :, 0]
    inverse = inverse if height > 1 else inverse.t()
    return data, functional.pad(inverse, (0, -inverse.shape[1] % 4)).contiguous()


def _wrapped(parts: dict[str, Tensor | None], tensor: Tensor, quantizer: Any) -> Any:
    from transformer_engine.pytorch import tensor as kinds

    blockwise = "_rowwise_data" in parts
    storage, whole = (
        (kinds.Float8BlockwiseQTensorStorage, kinds.Float8BlockwiseQTensor)
        if blockwise
        else (kinds.Float8TensorStorage, kinds.Float8Tensor)
    )
    names = {"_data": "data", "_transpose": "data_transpose", "_scale_inv": "fp8_scale_inv"}
    arguments: dict[str, Any] = {names.get(key, key[1:]): value for key, value in parts.items()}
    arguments |= {"fp8_dtype": quantizer.dtype, "quantizer": quantizer}
    if blockwise:
        arguments["is_2D_scaled"] = quantizer.block_scaling_dim == 2
    if quantizer.internal:
        return storage(**arguments)
    return whole(shape=tensor.shape, dtype=tensor.dtype, **arguments)


def dequantize(tensor: Any, otype: DType) -> Tensor:
    return values(tensor, rowwise=True).to(TORCH[otype])


def fp8_transpose(data: Tensor, dtype: DType, *, out: Tensor | None = None) -> Tensor:
    """[..., K] bytes -> [K, ...]."""
    turned = data.movedim(-1, 0).contiguous()
    return turned if out is None or out.shape != turned.shape else out.copy_(turned)


def swap_first_dims(tensor: Tensor, *, out: Tensor | None = None) -> Tensor:
    swapped = tensor.transpose(0, 1).contiguous()
    return swapped if out is None else out.copy_(swapped)


def is_fp8(x: Any) -> bool:
    return hasattr(x, "_fp8_dtype")


def values(x: Any, rowwise: bool) -> Tensor:
    """float32 values of a tensor, from the copy that a GPU would read: rows, or columns turned back."""
    if not is_fp8(x):
        return x.detach().float()
    if hasattr(x, "_rowwise_data"):
        return _values_of_blocks(x, rowwise)
    data = x._data if rowwise else (None if x._transpose_invalid else x._transpose)
    check(data is not None, f"Input is missing {'row' if rowwise else 'column'}-wise usage")
    found = data.view(TORCH[x._fp8_dtype]).float() * x._scale_inv
    return found if rowwise else found.movedim(0, -1)


def _values_of_blocks(x: Any, rowwise: bool) -> Tensor:
    data, inverse = (
        (x._rowwise_data, x._rowwise_scale_inv) if rowwise else (x._columnwise_data, x._columnwise_scale_inv)
    )
    check(data is not None, f"Input is missing {'row' if rowwise else 'column'}-wise usage")
    width = data.shape[-1] if rowwise else math.prod(data.shape[1:])
    flat = data.reshape(-1, width).view(TORCH[x._fp8_dtype]).float()
    height = BLOCK if x._is_2D_scaled else 1
    inverse = inverse if x._is_2D_scaled else inverse.t()
    inverse = inverse.repeat_interleave(height, 0).repeat_interleave(BLOCK, 1)
    found = (flat * inverse[: flat.shape[0], : flat.shape[1]]).reshape(data.shape)
    return found if rowwise else found.movedim(0, -1)


def generic_gemm(
    A: Any,
    transA: bool,
    B: Any,
    transB: bool,
    D: Tensor | None,
    quantizer: Any,
    output_dtype: DType | None,
    bias: Tensor | None,
    bias_type: DType,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> tuple[Any, Tensor | None, None, None]:
    """B' A' with matrices as torch shapes them; with ``grad`` a bias means that its gradient is wanted."""
    check(comm_overlap is None and not gelu, "no overlap and no fused GELU here")
    check(is_fp8(A) == is_fp8(B), "FP8 input to GEMM requires both to be FP8")
    check(hasattr(A, "_rowwise_data") == hasattr(B, "_rowwise_data"), "scaling modes of A and B differ")
    a, b = values(A, rowwise=transA), values(B, rowwise=not transB)
    lead = b.shape[:-1]
    a, b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    left, right = (b.t() if transB else b), (a.t() if transA else a)
    check(left.shape[1] == right.shape[0], f"GEMM of {list(left.shape)} and {list(right.shape)}")
    if is_fp8(A):
        check(left.shape[1] % 16 == 0, "Leading dimension requirement on A for FP8 GEMM. Caller must pad.")
        check(right.shape[1] % 8 == 0, "Outer dimension requirement on A for FP8 GEMM. Caller must pad.")
        if hasattr(A, "_rowwise_data"):
            check(use_split_accumulator, "Block scaling needs the split accumulator")
            check(
                not (A._is_2D_scaled and B._is_2D_scaled),
                "Only 1D by 1D, 1D by 2D, and 2D by 1D block scaling",
            )
            check(
                left.shape[0] % 8 == 0, "Outer dimension requirement on B for block scaling. Caller must pad."
            )
    product = alpha * (left @ right)
    bias_grad = None
    dtype = TORCH[output_dtype] if output_dtype is not None else A.dtype
    if bias is not None and grad:
        bias_grad = b.sum(0).to(dtype)
    elif bias is not None:
        product += bias.float()
    shape = (left.shape[0] if transB else lead, right.shape[1])
    product = product.reshape(*((shape[0],) if transB else shape[0]), shape[1])
    if quantizer is not None:
        return quantize(product.to(dtype), quantizer, D), bias_grad, None, None
    if D is None:
        return product.to(dtype), bias_grad, None, None
    check(D.shape == product.shape, f"GEMM output has invalid dims {list(D.shape)}")
    check(output_dtype is None or D.dtype == dtype, f"GEMM output has invalid dtype {D.dtype}")
    D.copy_(product + (beta if beta is not None else 1.0) * D.float() if accumulate else product)
    return D, bias_grad, None, None


def bgrad_quantize(grad: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    """The bias's gradient and the gradient in FP8."""
    total = grad.float().reshape(-1, grad.shape[-1]).sum(0).to(grad.dtype)
    return total, quantize(grad, quantizer) if quantizer is not None else grad


def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: Tensor,
    amax_histories: list[Tensor],
    scales: list[Tensor],
    amax_compute_algo: str,
    fp8_dtype: DType,
    margin: float,
) -> None:
    """Delayed scaling: enter the newest maxima into the histories, and scale by them."""
    most = torch.finfo(TORCH[fp8_dtype]).max * 2.0**-margin
    start = 0
    for history, scale in zip(amax_histories, scales, strict=True):
        reduced = amax_reduction_buffer[start : start + len(scale)]
        start += len(scale)
        newest = torch.where(reduced != 0, reduced, history[0])
        seen = newest != 0
        rolled = torch.cat([history[1:], newest[None]])
        amax = newest if amax_compute_algo == "most_recent" else torch.where(seen, rolled.amax(0), 0.0)
        rolled[0] = 0  # the place of the next
        history.copy_(torch.where(seen, rolled, history))
        good = amax.isfinite() & (amax > 0)
        scale.copy_(torch.where(good, (most / amax).clamp(max=torch.finfo(torch.float32).max), scale))
