"""The sequential CUDA kernels: float32 arithmetic, token by token (kernels/wkv7/sequential.cuh)."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.ops.wkv7.cuda_launch import WINDOW, aligned, launch, windows

__all__ = ["backward", "forward"]

_WORKSPACE_BYTES = 256 << 20


def forward(
    r: Tensor, w_raw: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
    state: Tensor, reset: Tensor | None, save: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As `trainer.ops.wkv7.cuda.forward`. The saved states are float32 [B,H,windows,N,N]."""
    batch, tokens, heads, size = r.shape
    y, state_out = torch.empty_like(r), torch.empty_like(state)
    starts = state.new_empty((batch, heads, windows(tokens), size, size) if save else 0)
    pointers = {
        "r": r, "w_raw": w_raw, "k": k, "v": v, "a": a, "b": b, "reset": reset, "state": state,
        "y": y, "state_out": state_out, "starts": starts if save else None,
    }  # fmt: skip
    launch("wkv7_forward", r, aligned(pointers), (0, windows(tokens)))
    return y, state_out, starts


def backward(
    r: Tensor, w_raw: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
    reset: Tensor | None, starts: Tensor, dy: Tensor | None, dstate_out: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As `trainer.ops.wkv7.cuda.backward`.

    Long or wide batches are walked in pieces, from the last token to the first, to bound the working memory
    (256 MiB, or what one window of 16 tokens needs). The pieces do not change the result.
    """
    batch, tokens, heads, size = r.shape
    count = windows(tokens)
    dr, dw_raw, dk, dv, da, db = (torch.empty_like(r) for _ in range(6))
    dstate = starts.new_empty(batch, heads, size, size)
    window_floats = batch * heads * (WINDOW * size + size * size)
    piece = min(count, max(1, _WORKSPACE_BYTES // (4 * window_floats)))
    pointers = aligned({
        "r": r, "w_raw": w_raw, "k": k, "v": v, "a": a, "b": b, "reset": reset, "starts": starts, "dy": dy,
        "dstate_in": dstate_out, "dr": dr, "dw_raw": dw_raw, "dk": dk, "dv": dv, "da": da, "db": db, "dstate": dstate,
        "workspace_du": starts.new_empty(batch, heads, piece, WINDOW, size),
        "workspace_d": starts.new_empty(batch, heads, piece, size, size),
    })  # fmt: skip
    for end in range(count, 0, -piece):
        launch("wkv7_backward", r, pointers, (max(0, end - piece), end))
        pointers["dstate_in"] = dstate
    return dr, dw_raw, dk, dv, da, db, dstate
