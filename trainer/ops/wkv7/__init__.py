"""WKV-7, the recurrence of RWKV-7, with state in and out, its gradients, and resets at any token.

One public function, `wkv7`, over interchangeable backends:

* `reference`  the token loop, the definition (`reference.py`)
* `chunked`    matrix products over 16 tokens, plain PyTorch, any device (`chunked.py`)
* `cuda`       CUDA C++ (`cuda.py`, sources in `kernels/wkv7/`): tensor cores where they fit, else token by token
* `cuda_sequential`  CUDA C++, always token by token in float32

All but `reference` are one pair of `torch.library` operators, so that torch.compile sees them whole and
activation checkpointing can keep their results.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from trainer.errors import KernelError
from trainer.logs import get_logger, log_once
from trainer.ops.wkv7 import chunked, cuda
from trainer.ops.wkv7.reference import wkv7_reference

__all__ = ["BACKENDS", "choose_backend", "wkv7"]

BACKENDS = ("auto", "cuda", "cuda_sequential", "chunked", "reference")
_CUDA_KERNELS = {"cuda": "auto", "cuda_sequential": "sequential"}
_logger = get_logger(__name__)


def _own_precision(like: Tensor) -> torch.autocast:
    """Keeps an autocast region around us from rounding the products inside the recurrence."""
    return torch.autocast(like.device.type, enabled=False)


@torch.library.custom_op("rwkv7::wkv_forward", mutates_args=())
def _wkv_forward(
    r: Tensor, w_raw: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
    state: Tensor, reset: Tensor | None, backend: str, save: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if backend in _CUDA_KERNELS:
        return cuda.forward(r, w_raw, k, v, a, b, state, reset, save, _CUDA_KERNELS[backend])
    with _own_precision(r):
        y, state_out, starts = chunked.forward(r, w_raw, k, v, a, b, state, reset)
    return y, state_out, starts if save else starts.new_empty(0)


@_wkv_forward.register_fake
def _(
    r: Tensor, w_raw: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
    state: Tensor, reset: Tensor | None, backend: str, save: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    batch, tokens, heads, size = r.shape
    starts = (batch, heads, (tokens + chunked.CHUNK - 1) // chunked.CHUNK, size, size) if save else (0,)
    dtype = cuda.starts_dtype(r, _CUDA_KERNELS[backend]) if backend in _CUDA_KERNELS else state.dtype
    return r.new_empty(r.shape), state.new_empty(state.shape), state.new_empty(starts, dtype=dtype)


@torch.library.custom_op("rwkv7::wkv_backward", mutates_args=())
def _wkv_backward(
    r: Tensor, w_raw: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
    reset: Tensor | None, starts: Tensor, dy: Tensor | None, dstate: Tensor | None, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    implementation = cuda.backward if backend in _CUDA_KERNELS else chunked.backward
    with _own_precision(r):
        return implementation(r, w_raw, k, v, a, b, reset, starts, dy, dstate)


@_wkv_backward.register_fake
def _(
    r: Tensor, w_raw: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
    reset: Tensor | None, starts: Tensor, dy: Tensor | None, dstate: Tensor | None, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    batch, _, heads, size = r.shape
    grads = (x.new_empty(x.shape) for x in (r, w_raw, k, v, a, b))
    dtype = torch.float32 if backend in _CUDA_KERNELS else starts.dtype
    return (*grads, starts.new_empty((batch, heads, size, size), dtype=dtype))  # type: ignore[return-value]


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    r, w_raw, k, v, a, b, _, reset, backend, _ = inputs
    ctx.save_for_backward(r, w_raw, k, v, a, b, reset, output[2])
    ctx.set_materialize_grads(False)
    ctx.backend = backend


def _autograd(ctx: Any, dy: Tensor | None, dstate: Tensor | None, _: Tensor | None) -> tuple:
    if dy is None and dstate is None:
        return (None,) * 10
    r, w_raw, k, v, a, b, reset, starts = ctx.saved_tensors
    dy = None if dy is None else dy.contiguous()
    dstate = None if dstate is None else dstate.contiguous()
    grads = _wkv_backward(r, w_raw, k, v, a, b, reset, starts, dy, dstate, ctx.backend)
    return (*grads, None, None, None)


_wkv_forward.register_autograd(_autograd, setup_context=_setup_context)


def choose_backend(wanted: str, r: Tensor) -> str:
    """Backend that runs a call with an input like `r` [B, T, H, N]: `wanted`, or for `auto` the fastest that can.

    Raises:
        KernelError: if `wanted` is `cuda` and it cannot run, with the reason.
    """
    if wanted in ("chunked", "reference"):
        return wanted
    return _known_backend(wanted, r.device.type, r.device.index, r.dtype, r.shape[-1])


@torch.compiler.assume_constant_result
def _known_backend(wanted: str, kind: str, index: int | None, dtype: torch.dtype, head_size: int) -> str:
    """What compiled code takes as a constant; Dynamo would look into a cached function and trace it."""
    return _cached_backend(wanted, kind, index, dtype, head_size)


@functools.cache
def _cached_backend(wanted: str, kind: str, index: int | None, dtype: torch.dtype, head_size: int) -> str:
    """The choice asks the driver and the file system: once per device, and never inside a compiled graph."""
    reason = cuda.unavailable_reason(
        torch.empty(1, 1, 1, head_size, dtype=dtype, device=kind if index is None else f"{kind}:{index}")
    )
    if reason is None:
        return wanted if wanted in _CUDA_KERNELS else "cuda"
    if wanted in _CUDA_KERNELS:
        raise KernelError(
            "model.kernel", "the CUDA kernel cannot run", found=wanted, rule=reason, fix="set model.kernel: auto"
        )
    if kind == "cuda":
        log_once(_logger, "kernel=chunked (slow on a GPU): %s", reason)
    return "chunked"


def wkv7(
    r: Tensor, w_raw: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
    state: Tensor | None = None, reset: Tensor | None = None, backend: str = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run the RWKV-7 recurrence over T tokens.

    Args:
        r: receptance, [B, T, H, N], any T >= 0, float64, float32, bfloat16 or float16.
        w_raw: decay before its squashing: w = exp(-exp(-1/2) * sigmoid(w_raw)), same shape and dtype.
        k: keys, same shape.
        v: values, same shape.
        a: removal direction, -kk in the paper's notation.
        b: replacement direction, kk times the in-context learning rate.
        state: [B, H, N_value, N_key] at the start; None = zero. Kept in float32, or float64 for float64 inputs.
        reset: bool [B, T], true where the state is zeroed before the token; None = nowhere.
        backend: one of `BACKENDS`.

    Returns:
        y [B, T, H, N] in the dtype of r, and the state after the last token. Both are differentiable
        with respect to all six inputs and the incoming state.

    Raises:
        KernelError: if `backend` is a CUDA backend and it cannot run here.
    """
    batch, tokens, heads, size = r.shape
    state_dtype = torch.float64 if r.dtype == torch.float64 else torch.float32
    if state is None:
        state = torch.zeros(batch, heads, size, size, dtype=state_dtype, device=r.device)
    state = state.to(state_dtype)
    dtype = r.dtype
    inputs = [x.float() if dtype == torch.float16 else x for x in (r, w_raw, k, v, a, b)]
    backend = choose_backend(backend, inputs[0])
    if backend == "reference":
        r, w_raw, k, v, a, b = inputs
        with _own_precision(r):
            y, state_out = wkv7_reference(r, w_raw, k, v, a, b, state, reset)
        return y.to(dtype), state_out
    if tokens == 0:
        return torch.zeros_like(r), state.clone()
    inputs = [x.contiguous() for x in inputs]
    reset = None if reset is None else reset.contiguous()
    y, state_out, _ = _wkv_forward(*inputs, state.contiguous(), reset, backend, torch.is_grad_enabled())
    return y.to(dtype), state_out
