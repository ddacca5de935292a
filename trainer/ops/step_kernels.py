"""CUDA kernels of the training step besides the recurrence (`kernels/step/`), each with a plain form beside it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.errors import KernelError
from trainer.ops.wkv7 import build
from trainer.ops.wkv7.cuda_launch import OLDEST_ARCH, architectures

__all__ = ["add_gradients", "cross_entropy_rows", "has_cross_entropy_kernel"]

_VECTOR = 8


@functools.cache
def _library(device: int) -> ctypes.CDLL | None:
    """The compiled kernels, or None where they cannot be had."""
    major, minor = torch.cuda.get_device_capability(device)
    if torch.version.hip is not None or major * 10 + minor < OLDEST_ARCH or build.find_nvcc() is None:
        return None
    library = build.load_library(architectures())
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    library.step_cross_entropy.argtypes = [
        ctypes.c_int, pointer, pointer, pointer, pointer, size, size, ctypes.c_float, ctypes.c_int, pointer
    ]  # fmt: skip
    library.step_accumulate.argtypes = [ctypes.c_int, ctypes.c_int, pointer, pointer, pointer, pointer]
    library.step_most_tensors.restype = size
    return library


def _check(status: int, name: str) -> None:
    if status != 0:
        raise KernelError(f"CUDA kernel {name}", "launch failed", found=f"cudaError {status}")


def _stream(tensor: Tensor) -> int:
    return torch.cuda.current_stream(tensor.device).cuda_stream


def has_cross_entropy_kernel(logits_RV: Tensor) -> bool:
    """Whether `cross_entropy_rows` takes these logits: bfloat16 on a GPU, contiguous, V a multiple of 8."""
    is_plain = logits_RV.is_cuda and logits_RV.dtype == torch.bfloat16 and logits_RV.is_contiguous()
    return is_plain and logits_RV.shape[1] % _VECTOR == 0 and _library(logits_RV.device.index) is not None


def cross_entropy_rows(
    logits_RV: Tensor, target_R: Tensor, weight_R: Tensor, l2wrap: float, with_gradient: bool
) -> Tensor:
    """Weighted cross-entropy of each row; with `with_gradient` the logits become their gradient, in place.

    Args:
        logits_RV: bfloat16 [R, V], see `has_cross_entropy_kernel`.
        target_R: int64 [R].
        weight_R: float32 [R].
        l2wrap: strength of the penalty on the largest logit.
        with_gradient: whether to overwrite the logits.

    Returns:
        float32 [R]: weight * (logsumexp - logit of the target).
    """
    library = _library(logits_RV.device.index)
    assert library is not None
    rows, vocab = logits_RV.shape
    losses_R = torch.empty(rows, dtype=torch.float32, device=logits_RV.device)
    target_R, weight_R = target_R.contiguous(), weight_R.contiguous()
    status = library.step_cross_entropy(
        logits_RV.device.index, logits_RV.data_ptr(), target_R.data_ptr(), weight_R.data_ptr(), losses_R.data_ptr(),
        rows, vocab, l2wrap, int(with_gradient), _stream(logits_RV),
    )  # fmt: skip
    _check(status, "cross_entropy")
    return losses_R


def add_gradients(totals: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Add each gradient to its total, in the dtype of the totals; shapes are equal in pairs.

    Bfloat16 gradients on a GPU take a few launches for all of them together.
    """
    rest: list[tuple[Tensor, Tensor]] = []
    fast: list[tuple[Tensor, Tensor]] = []
    for pair in zip(totals, gradients, strict=True):
        (fast if _is_fast(*pair) else rest).append(pair)
    for total, gradient in rest:
        total.add_(gradient)
    if not fast:
        return
    device = fast[0][0].device
    library = _library(device.index)
    assert library is not None
    most = library.step_most_tensors()
    for start in range(0, len(fast), most):
        part = fast[start : start + most]
        pointers = ctypes.c_void_p * len(part)
        status = library.step_accumulate(
            device.index,
            len(part),
            pointers(*(total.data_ptr() for total, _ in part)),
            pointers(*(gradient.data_ptr() for _, gradient in part)),
            (ctypes.c_int64 * len(part))(*(total.numel() for total, _ in part)),
            _stream(part[0][0]),
        )
        _check(status, "accumulate")


def _is_fast(total: Tensor, gradient: Tensor) -> bool:
    plain = gradient.is_cuda and gradient.dtype == torch.bfloat16 and total.dtype == torch.float32
    return (
        plain
        and gradient.numel() > 0
        and gradient.is_contiguous()
        and total.is_contiguous()
        and _is_aligned(total, gradient)
        and _library(gradient.device.index) is not None
    )


def _is_aligned(*tensors: Tensor) -> bool:
    return all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
