"""Calls the compiled WKV-7 launchers with PyTorch's memory and stream."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from trainer.errors import KernelError
from trainer.ops.wkv7 import cuda_nvrtc

__all__ = [
    "OLDEST_ARCH", "WINDOW", "ChunkedArgs", "SequentialArgs", "aligned", "architectures", "has_nvcc", "launch", "windows",
]  # fmt: skip

WINDOW = 16
"""Tokens between two states that the forward pass saves for the backward pass."""

OLDEST_ARCH = 75
"""Compute capability, without the dot, that the kernels need at least."""

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""Dtypes of the inputs that are compiled, with their numbers."""

_INPUTS = ("r", "w_raw", "k", "v", "a", "b", "reset", "state", "y", "state_out", "starts", "dy", "dstate_in")
_GRADIENTS = ("dr", "dw_raw", "dk", "dv", "da", "db", "dstate")
_SIZES = ("batch", "tokens", "heads", "window_begin", "window_end")


class SequentialArgs(ctypes.Structure):
    """`struct Wkv7Args` of kernels/wkv7/sequential.cuh, which says what each field is."""

    _fields_ = [(name, ctypes.c_void_p) for name in (*_INPUTS, *_GRADIENTS, "workspace_du", "workspace_d")] + [
        (name, ctypes.c_int64) for name in _SIZES
    ]


class ChunkedArgs(ctypes.Structure):
    """`struct Wkv7ChunkedArgs` of kernels/wkv7/chunked.cuh, which says what each field is."""

    _fields_ = [(name, ctypes.c_void_p) for name in (*_INPUTS, *_GRADIENTS, "operands", "pairs", "ends")] + [
        (name, ctypes.c_int64) for name in (*_SIZES, "warps", "piece")
    ]


_ARGS: dict[str, type[ctypes.Structure]] = {
    "wkv7_forward": SequentialArgs,
    "wkv7_backward": SequentialArgs,
    "wkv7_chunked_forward": ChunkedArgs,
    "wkv7_chunked_backward": ChunkedArgs,
}


def windows(tokens: int) -> int:
    """Windows of 16 tokens that a row of `tokens` has; the last one may be shorter."""
    return (tokens + WINDOW - 1) // WINDOW


def aligned(pointers: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """The kernels read 16 bytes at once; a slice of a larger tensor may begin anywhere and is then copied."""
    return {
        name: tensor.clone() if tensor is not None and tensor.data_ptr() % 16 and name != "reset" else tensor
        for name, tensor in pointers.items()
    }


def launch(function: str, r: Tensor, pointers: dict[str, Tensor | None], span: tuple[int, int], **sizes: int) -> None:
    """Call a launcher.

    Args:
        function: its name in the library.
        r: receptance [B,T,H,N] of the call: its shape, dtype and device.
        pointers: buffers by field name.
        span: windows [begin, end) that the call goes through.
        sizes: further fields.

    Raises:
        KernelError: the kernels cannot be compiled or launched.
    """
    batch, tokens, heads, size = r.shape
    args = _ARGS[function](batch=batch, tokens=tokens, heads=heads, window_begin=span[0], window_end=span[1], **sizes)
    for name, tensor in pointers.items():
        assert tensor is None or tensor.is_contiguous(), name
        setattr(args, name, None if tensor is None else tensor.data_ptr())
    if not has_nvcc():
        cuda_nvrtc.launch(r, args, reverse=function == "wkv7_chunked_backward")
        return
    library = _library(architectures())
    stream = torch.cuda.current_stream(r.device).cuda_stream
    with torch.cuda.device(r.device):
        status = getattr(library, function)(r.device.index, size, DTYPES[r.dtype], ctypes.byref(args), stream)
    if status != 0:
        raise KernelError(
            f"CUDA kernel {function}",
            f"launch failed: {library.wkv7_error_string(status).decode()}",
            found=f"B={batch} T={tokens} H={heads} N={size} {r.dtype}",
            fix="set model.kernel: chunked",
        )


@functools.cache
def has_nvcc() -> bool:
    """Whether the kernels are compiled by nvcc; otherwise NVRTC compiles the tensor-core kernels."""
    from trainer.ops.wkv7 import build  # here, so that `python -m trainer.ops.wkv7.build` runs that module once

    return build.find_nvcc() is not None


@functools.cache
def architectures() -> tuple[int, ...]:
    """Compute capabilities of the visible cards that the kernels support, as in 90 for 9.0."""
    capabilities = (torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count()))
    return tuple(sorted({major * 10 + minor for major, minor in capabilities if major * 10 + minor >= OLDEST_ARCH}))


@functools.cache
def _library(archs: tuple[int, ...]) -> ctypes.CDLL:
    from trainer.ops.wkv7 import build  # here, so that `python -m trainer.ops.wkv7.build` runs that module once

    library = build.load_library(archs)
    library.wkv7_error_string.restype = ctypes.c_char_p
    for name in ("wkv7_args_bytes", "wkv7_chunked_args_bytes"):
        getattr(library, name).restype = ctypes.c_int64
    for name, args in _ARGS.items():
        pointer = ctypes.POINTER(args)
        getattr(library, name).argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int, pointer, ctypes.c_void_p]
    assert library.wkv7_args_bytes() == ctypes.sizeof(SequentialArgs), "differs from struct Wkv7Args"
    assert library.wkv7_chunked_args_bytes() == ctypes.sizeof(ChunkedArgs), "differs from struct Wkv7ChunkedArgs"
    return library
