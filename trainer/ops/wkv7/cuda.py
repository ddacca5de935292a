"""The CUDA backend of WKV-7: chooses between the tensor-core kernels and the sequential ones.

Both are deterministic and take any number of tokens. The recurrence and the layout of every buffer are described in
kernels/wkv7/chunked.cuh and kernels/wkv7/sequential.cuh.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.ops.wkv7 import cuda_chunked, cuda_nvrtc, cuda_sequential
from trainer.ops.wkv7.cuda_launch import DTYPES, OLDEST_ARCH, has_nvcc

__all__ = ["HEAD_SIZES", "KERNELS", "backward", "choose_kernel", "forward", "starts_dtype", "unavailable_reason"]

HEAD_SIZES = (16, 32, 64, 128)
"""Head sizes that are compiled."""

KERNELS = ("auto", "tensor_core", "sequential")
"""`sequential` computes in float32; `tensor_core` rounds factors to bfloat16 and is many times faster."""


def unavailable_reason(r: Tensor) -> str | None:
    """Why the CUDA kernels cannot run a call with this `r` [B,T,H,N], or None if they can."""
    head_size = r.shape[-1]
    if r.device.type != "cuda":
        return f"the tensors are on {r.device.type}, not on a CUDA device"
    if torch.version.hip is not None:
        return "this PyTorch is built for ROCm, not for CUDA"
    if head_size not in HEAD_SIZES:
        return f"head size {head_size} is not compiled (there are {', '.join(map(str, HEAD_SIZES))})"
    if r.dtype not in DTYPES:
        return f"dtype {r.dtype} is not compiled (there are float32 and bfloat16)"
    if _capability(r) < OLDEST_ARCH:
        return f"the GPU's compute capability {_capability(r) / 10} is below {OLDEST_ARCH / 10}"
    if not has_nvcc():
        if cuda_nvrtc.find_nvrtc() is None:
            return "neither the compiler nvcc nor NVRTC with CUDA's headers was found"
        if not _fits_tensor_cores(r):
            return "the compiler nvcc was not found; without it there is bfloat16 with head size 64 only"
    return None


def choose_kernel(r: Tensor, wanted: str = "auto") -> str:
    """`tensor_core` or `sequential`, for a call with this `r` [B,T,H,N].

    Args:
        r: receptance; its head size, dtype and device decide.
        wanted: one of `KERNELS`; auto = tensor cores for bfloat16, head size 64, compute capability 8.0 or higher.
    """
    assert wanted in KERNELS, wanted
    if wanted != "auto":
        return wanted
    return "tensor_core" if _fits_tensor_cores(r) else "sequential"


def _fits_tensor_cores(r: Tensor) -> bool:
    fits = r.dtype == torch.bfloat16 and r.shape[-1] == cuda_chunked.HEAD_SIZE
    return fits and _capability(r) >= cuda_chunked.OLDEST_ARCH


def starts_dtype(r: Tensor, wanted: str = "auto") -> torch.dtype:
    """Dtype of the third result of `forward`."""
    return cuda_chunked.STARTS_DTYPE if choose_kernel(r, wanted) == "tensor_core" else torch.float32


def _capability(r: Tensor) -> int:
    major, minor = torch.cuda.get_device_capability(r.device)
    return major * 10 + minor


def forward(
    r: Tensor, w_raw: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
    state: Tensor, reset: Tensor | None, save: bool, kernel: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
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
        kernel: one of `KERNELS`.

    Returns:
        y in the dtype of r, [B,T,H,N]; the outgoing state, float32 [B,H,N,N]; and the state before each window of 16
        tokens, [B,H,ceil(T/16),N,N] in the kernel's own dtype and order, or an empty tensor if `save` is false.

    Raises:
        KernelError: the kernels cannot be compiled or launched.
    """
    module = cuda_chunked if choose_kernel(r, kernel) == "tensor_core" else cuda_sequential
    return module.forward(r, w_raw, k, v, a, b, state, reset, save)


def backward(
    r: Tensor, w_raw: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
    reset: Tensor | None, starts: Tensor, dy: Tensor | None, dstate_out: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of `forward`, by the same kernel, on the current stream.

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
    assert starts.dim() == 5, "forward was run without save"
    module = cuda_chunked if starts.dtype == cuda_chunked.STARTS_DTYPE else cuda_sequential
    return module.backward(r, w_raw, k, v, a, b, reset, starts, dy, dstate_out)
