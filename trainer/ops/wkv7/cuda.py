"""The CUDA backend of WKV-7: hands PyTorch's memory and stream to the compiled kernels.

The kernels run in float32 inside, are deterministic, and take any number of tokens. The recurrence and the layout of
every buffer are described in kernels/wkv7/sequential.cuh.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from trainer.errors import KernelError

__all__ = ["HEAD_SIZES", "WINDOW", "KernelArgs", "architectures", "backward", "forward", "launch", "unavailable_reason"]

HEAD_SIZES = (16, 32, 64, 128)
"""Head sizes that are compiled."""

WINDOW = 16
"""Tokens between two states that the forward pass saves for the backward pass."""

_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_OLDEST_ARCH = 75
_WORKSPACE_BYTES = 256 << 20

_POINTERS = (
    "r", "w_raw", "k", "v", "a", "b", "reset", "state", "y", "state_out", "starts", "dy", "dstate_in",
    "dr", "dw_raw", "dk", "dv", "da", "db", "dstate", "workspace_du", "workspace_d",
)  # fmt: skip
_SIZES = ("batch", "tokens", "heads", "window_begin", "window_end")


class KernelArgs(ctypes.Structure):
    """`struct Wkv7Args` of kernels/wkv7/sequential.cuh, which says what each field is."""

    _fields_ = [(name, ctypes.c_void_p) for name in _POINTERS] + [(name, ctypes.c_int64) for name in _SIZES]


def unavailable_reason(r: Tensor) -> str | None:
    """Why the CUDA kernels cannot run a call with this `r` [B,T,H,N], or None if they can."""
    head_size = r.shape[-1]
    if r.device.type != "cuda":
        return f"the tensors are on {r.device.type}, not on a CUDA device"
    if torch.version.hip is not None:
        return "this PyTorch is built for ROCm, not for CUDA"
    if head_size not in HEAD_SIZES:
        return f"head size {head_size} is not compiled (there are {', '.join(map(str, HEAD_SIZES))})"
    if r.dtype not in _DTYPES:
        return f"dtype {r.dtype} is not compiled (there are float32 and bfloat16)"
    major, minor = torch.cuda.get_device_capability(r.device)
    if major * 10 + minor < _OLDEST_ARCH:
        return f"the GPU's compute capability {major}.{minor} is below 7.5"
    from trainer.ops.wkv7 import build  # here, so that `python -m trainer.ops.wkv7.build` runs that module once

    if build.find_nvcc() is None:
        return "the compiler nvcc was not found"
    return None


def forward(
    r: Tensor,
    w_raw: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor,
    reset: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the recurrence on the current stream.

    Args:
        r: receptance [B,T,H,N], contiguous, bfloat16 or float32, T >= 1; the next five likewise.
        w_raw: decay before the clamp.
        k: key.
        v: value.
        a: removal key, minus the normalised key.
        b: replacement key, the normalised key times the in-context learning rate.
        state: incoming state, float32 [B,H,N,N] (value, key).
        reset: bool [B,T]; the state is zeroed before these tokens. None: nowhere.
        save: whether to keep what `backward` needs.

    Returns:
        y in the dtype of r, [B,T,H,N]; the outgoing state, float32 [B,H,N,N]; and the state before each window of 16
        tokens, float32 [B,H,ceil(T/16),N,N], or an empty tensor if `save` is false.

    Raises:
        KernelError: the kernels cannot be compiled or launched.
    """
    batch, tokens, heads, size = r.shape
    y = torch.empty_like(r)
    state_out = torch.empty_like(state)
    starts = state.new_empty((batch, heads, _windows(tokens), size, size) if save else 0)
    pointers = {
        "r": r, "w_raw": w_raw, "k": k, "v": v, "a": a, "b": b, "reset": reset, "state": state,
        "y": y, "state_out": state_out, "starts": starts if save else None,
    }  # fmt: skip
    launch("wkv7_forward", r, _aligned(pointers), (0, _windows(tokens)))
    return y, state_out, starts


def backward(
    r: Tensor,
    w_raw: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    reset: Tensor | None,
    starts: Tensor,
    dy: Tensor | None,
    dstate_out: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `forward`, on the current stream.

    Long or wide batches are walked in pieces, from the last token to the first, to bound the working memory
    (256 MiB, or what one window of 16 tokens needs). The pieces do not change the result.

    Args:
        r: receptance [B,T,H,N]; this and the next six as given to `forward`.
        w_raw: decay before the clamp.
        k: key.
        v: value.
        a: removal key.
        b: replacement key.
        reset: bool [B,T] or None.
        starts: third result of `forward`.
        dy: gradient of y, in its dtype, or None for zero.
        dstate_out: gradient of the outgoing state, float32 [B,H,N,N], or None for zero.

    Returns:
        Gradients of r, w_raw, k, v, a, b in their dtype and of the incoming state in float32.

    Raises:
        KernelError: the kernels cannot be compiled or launched.
    """
    batch, tokens, heads, size = r.shape
    windows = _windows(tokens)
    assert starts.shape == (batch, heads, windows, size, size), "forward was run without save"
    dr, dw_raw, dk, dv, da, db = (torch.empty_like(r) for _ in range(6))
    dstate = starts.new_empty(batch, heads, size, size)
    window_floats = batch * heads * (WINDOW * size + size * size)
    piece = min(windows, max(1, _WORKSPACE_BYTES // (4 * window_floats)))
    pointers = _aligned({
        "r": r, "w_raw": w_raw, "k": k, "v": v, "a": a, "b": b, "reset": reset, "starts": starts, "dy": dy,
        "dstate_in": dstate_out, "dr": dr, "dw_raw": dw_raw, "dk": dk, "dv": dv, "da": da, "db": db, "dstate": dstate,
        "workspace_du": starts.new_empty(batch, heads, piece, WINDOW, size),
        "workspace_d": starts.new_empty(batch, heads, piece, size, size),
    })  # fmt: skip
    for end in range(windows, 0, -piece):
        launch("wkv7_backward", r, pointers, (max(0, end - piece), end))
        pointers["dstate_in"] = dstate
    return dr, dw_raw, dk, dv, da, db, dstate


def _windows(tokens: int) -> int:
    return (tokens + WINDOW - 1) // WINDOW


def _aligned(pointers: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """The kernels read 16 bytes at once; a slice of a larger tensor may begin anywhere."""
    return {
        name: tensor.clone() if tensor is not None and tensor.data_ptr() % 16 and name != "reset" else tensor
        for name, tensor in pointers.items()
    }


def launch(function: str, r: Tensor, pointers: dict[str, Tensor | None], windows: tuple[int, int]) -> None:
    """Call a launcher, `wkv7_forward` or `wkv7_backward`, for windows [begin, end) with these buffers, by field name.

    Raises:
        KernelError: the kernels cannot be compiled or launched.
    """
    batch, tokens, heads, size = r.shape
    args = KernelArgs(batch=batch, tokens=tokens, heads=heads, window_begin=windows[0], window_end=windows[1])
    for name, tensor in pointers.items():
        assert tensor is None or tensor.is_contiguous(), name
        setattr(args, name, None if tensor is None else tensor.data_ptr())
    library = _library(architectures())
    stream = torch.cuda.current_stream(r.device).cuda_stream
    with torch.cuda.device(r.device):
        status = getattr(library, function)(r.device.index, size, _DTYPES[r.dtype], ctypes.byref(args), stream)
    if status != 0:
        raise KernelError(
            f"CUDA kernel {function}",
            f"launch failed: {library.wkv7_error_string(status).decode()}",
            found=f"B={batch} T={tokens} H={heads} N={size} {r.dtype}",
            fix="set model.kernel: chunked",
        )


@functools.cache
def architectures() -> tuple[int, ...]:
    """Compute capabilities of the visible cards that the kernels support, as in 90 for 9.0."""
    capabilities = (torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count()))
    return tuple(sorted({major * 10 + minor for major, minor in capabilities if major * 10 + minor >= _OLDEST_ARCH}))


@functools.cache
def _library(archs: tuple[int, ...]) -> ctypes.CDLL:
    from trainer.ops.wkv7 import build  # see unavailable_reason

    library = build.load_library(archs)
    library.wkv7_args_bytes.restype = ctypes.c_int64
    library.wkv7_shared_bytes.restype = ctypes.c_int64
    library.wkv7_error_string.restype = ctypes.c_char_p
    for function in (library.wkv7_forward, library.wkv7_backward):
        function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.POINTER(KernelArgs), ctypes.c_void_p]
    assert library.wkv7_args_bytes() == ctypes.sizeof(KernelArgs), "KernelArgs differs from struct Wkv7Args"
    return library
