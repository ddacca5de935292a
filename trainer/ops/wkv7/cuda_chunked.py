"""The tensor-core CUDA kernels: chunks of 16 tokens, head size 64, bfloat16 inputs (kernels/wkv7/chunked.cuh)."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from trainer.ops.wkv7.cuda_launch import aligned, launch, windows

__all__ = ["HEAD_SIZE", "OLDEST_ARCH", "STARTS_DTYPE", "backward", "forward"]

HEAD_SIZE = 64
"""The one head size that is compiled."""

OLDEST_ARCH = 80
"""Compute capability, without the dot, that the kernels need at least."""

STARTS_DTYPE = torch.bfloat16
"""Of the saved states [B,H,windows,N,N]. Their elements lie in the kernels' own order."""

OPERANDS_BYTES = (12032, 8960)
"""Working memory per window of one head unless a block has all of it: forward, backward (`Operands` in prepare.cuh)."""

PAIRS_BYTES = 3072
"""Further working memory per window of one head, backward (`Pairs` in prepare.cuh)."""

BUFFERS = (2, 3)
"""Pieces that are in work at once: forward, backward (`kBuffers` in chunked.cu)."""

_ALL_WARPS = 4  # that carry a head's state; in one block, they get its operands from warps beside them
_WORKSPACE_BYTES = 200 << 20
_PIECES = 1  # or more, to fit the working memory; few and large ones are faster than many side by side
_SHORTEST_PIECE = 16  # windows, unless the working memory is too small


def forward(
    r: Tensor, w_raw: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
    state: Tensor, reset: Tensor | None, save: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As `trainer.ops.wkv7.cuda.forward`.

    Without working memory if there are enough heads for all processors, else in pieces, from the first token to the
    last, as `backward`.
    """
    batch, tokens, heads, size = r.shape
    count = windows(tokens)
    y, state_out = torch.empty_like(r), torch.empty_like(state)
    starts = torch.empty((batch, heads, count, size, size) if save else 0, dtype=STARTS_DTYPE, device=r.device)
    warps = _warps(r)
    operands_bytes = 0 if warps == _ALL_WARPS else OPERANDS_BYTES[0]
    piece, buffers = _pieces(count, batch * heads * operands_bytes, BUFFERS[0]) if operands_bytes else (count, 1)
    pointers = aligned({
        "r": r, "w_raw": w_raw, "k": k, "v": v, "a": a, "b": b, "reset": reset, "state": state,
        "y": y, "state_out": state_out, "starts": starts if save else None,
        "operands": _bytes(r, buffers * batch * heads * piece * operands_bytes),
    })  # fmt: skip
    launch("wkv7_chunked_forward", r, pointers, (0, count), warps=warps, piece=piece)
    return y, state_out, starts


def backward(
    r: Tensor, w_raw: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
    reset: Tensor | None, starts: Tensor, dy: Tensor | None, dstate_out: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As `trainer.ops.wkv7.cuda.backward`.

    Rows are walked in pieces, from the last token to the first, which bound the working memory (200 MiB, or what three
    windows of 16 tokens need). They do not change the result.
    """
    batch, tokens, heads, size = r.shape
    count = windows(tokens)
    dr, dw_raw, dk, dv, da, db = (torch.empty_like(r) for _ in range(6))
    dstate = torch.empty(batch, heads, size, size, dtype=torch.float32, device=r.device)
    ends_bytes = size * size * STARTS_DTYPE.itemsize
    warps = _warps(r)
    operands_bytes = 0 if warps == _ALL_WARPS else OPERANDS_BYTES[1]
    piece, buffers = _pieces(count, batch * heads * (operands_bytes + PAIRS_BYTES + ends_bytes), BUFFERS[1])
    pointers = aligned({
        "r": r, "w_raw": w_raw, "k": k, "v": v, "a": a, "b": b, "reset": reset, "starts": starts, "dy": dy,
        "dstate_in": dstate_out, "dr": dr, "dw_raw": dw_raw, "dk": dk, "dv": dv, "da": da, "db": db, "dstate": dstate,
        "operands": _bytes(r, buffers * batch * heads * piece * operands_bytes),
        "pairs": _bytes(r, buffers * batch * heads * piece * PAIRS_BYTES),
        "ends": _bytes(r, buffers * batch * heads * piece * ends_bytes),
    })  # fmt: skip
    launch("wkv7_chunked_backward", r, pointers, (0, count), warps=warps, piece=piece)
    return dr, dw_raw, dk, dv, da, db, dstate


def _bytes(like: Tensor, count: int) -> Tensor:
    return torch.empty(count, dtype=torch.uint8, device=like.device)


def _pieces(count: int, window_bytes: int, buffers: int) -> tuple[int, int]:
    """Windows per piece, all pieces but the last alike, and how many pieces are to have working memory at once."""
    pieces = max(min(_PIECES, count // _SHORTEST_PIECE), -(-count * window_bytes * buffers // _WORKSPACE_BYTES), 1)
    piece = max(1, -(-count // pieces))
    return piece, min(buffers, -(-count // piece))


def _warps(r: Tensor) -> int:
    """Warps per block of the scan, of the four that share a head: fewer when there are fewer heads than processors."""
    batch, _, heads, _ = r.shape
    processors = _processors(r.device)
    if batch * heads * 8 <= processors:
        return 1
    return 2 if batch * heads * 2 <= processors else _ALL_WARPS


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
