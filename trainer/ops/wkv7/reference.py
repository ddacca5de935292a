"""The WKV-7 recurrence, token by token: the definition that all other backends are tested against.

For one row and one head, with state S [N_value, N_key] and vectors of length N:

    u_t = S_{t-1} a_t
    S_t = S_{t-1} diag(w_t) + u_t b_t^T + v_t k_t^T        w_t = exp(-exp(-1/2) * sigmoid(w_raw_t))
    y_t = S_t r_t

A reset before token t replaces S_{t-1} by zero.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["DECAY_SCALE", "log_decay", "wkv7_reference"]

DECAY_SCALE = math.exp(-0.5)
"""Largest decay per token, as -log w. It keeps w above 0.545, so that exp(-cumulative log w) over 16 tokens is at most 1.6e4."""


def log_decay(w_raw: Tensor) -> Tensor:
    """Natural logarithm of the decay, in (-exp(-1/2), 0), for any real `w_raw`."""
    return -DECAY_SCALE * torch.sigmoid(w_raw)


def wkv7_reference(
    r: Tensor, w_raw: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor, reset: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Token loop under ordinary autograd; arguments and results as `trainer.ops.wkv7.wkv7`."""
    dtype = state.dtype
    decay, receptance, key, value, removal, replacement = (
        x.to(dtype) for x in (torch.exp(log_decay(w_raw.to(dtype))), r, k, v, a, b)
    )
    outputs = []
    for t in range(r.shape[1]):
        if reset is not None:
            state = torch.where(reset[:, t, None, None, None], torch.zeros_like(state), state)
        u = torch.einsum("bhvk,bhk->bhv", state, removal[:, t])
        state = (
            state * decay[:, t, :, None, :]
            + u[..., None] * replacement[:, t, :, None, :]
            + value[:, t, :, :, None] * key[:, t, :, None, :]
        )
        outputs.append(torch.einsum("bhvk,bhk->bhv", state, receptance[:, t]))
    if not outputs:
        return torch.zeros_like(r), state.clone()
    return torch.stack(outputs, 1).to(r.dtype), state
