"""WKV-7 as matrix products over chunks of 16 tokens: plain PyTorch, any device, hand-written backward.

Within a chunk, with L the inclusive sum of log decays and rows of all matrices running over time:

    R~ = R exp(L)   A~ = A exp(L - l)   B^ = B exp(-L)   K^ = K exp(-L)   B- = B^ P   K- = K^ P   P = exp(L_last)
    M_ab = tril(A~ B^^T, -1)   M_ak = tril(A~ K^^T, -1)   M_rb = tril(R~ B^^T)   M_rk = tril(R~ K^^T)
    T = (I - M_ab)^-1          W = T A~                   U = W S_0^T + T M_ak V
    Y = R~ S_0^T + M_rb U + M_rk V                        S_1 = S_0 diag(P) + U^T B- + V^T K-

Only U and S depend on the state; the rest is computed for all chunks at once. A reset inside a chunk cuts
it into segments: products between tokens of different segments are masked, the incoming state reaches
the first segment only, and only the last segment reaches the outgoing state. docs/math.md derives both
directions. The decay gradient uses the identity  dl_t = colsum(S_0 * dS_0) - sum_{s<=t} a_s da_s -
sum_{s<t} (r_s dr_s - b_s db_s - k_s dk_s), so it needs no product of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.ops.wkv7.reference import DECAY_SCALE

__all__ = ["CHUNK", "backward", "forward"]

CHUNK = 16


@dataclass
class _Intra:
    """What a chunk is before the state is known. Axes: [G chunks of all rows and heads, 16, N] or [.., 16, 16]."""

    r: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    exp_incl: Tensor
    exp_excl: Tensor
    exp_neg: Tensor
    decay_all: Tensor
    r_tilde: Tensor
    a_tilde: Tensor
    b_hat: Tensor
    k_hat: Tensor
    b_bar: Tensor
    k_bar: Tensor
    m_ab: Tensor
    m_ak: Tensor
    m_rb: Tensor
    m_rk: Tensor
    inverse: Tensor
    w: Tensor
    first: Tensor | None
    last: Tensor | None
    same: Tensor | None


def _to_chunks(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, T, H, N] -> [B, H, chunks, 16, N], zeros after T."""
    batch, tokens, heads, size = x.shape
    pad = -tokens % CHUNK
    x = x.to(dtype)
    if pad:
        x = F.pad(x, (0, 0, 0, 0, 0, pad))
    return x.view(batch, (tokens + pad) // CHUNK, CHUNK, heads, size).permute(0, 3, 1, 2, 4).contiguous()


def _from_chunks(x: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    """[B, H, chunks, 16, N] -> [B, T, H, N]."""
    batch, heads, chunks, _, size = x.shape
    return x.permute(0, 2, 3, 1, 4).reshape(batch, chunks * CHUNK, heads, size)[:, :tokens].to(dtype).contiguous()


def _unit_lower_inverse(m: Tensor) -> Tensor:
    """(I - m)^-1 of strictly lower 16 x 16 matrices, by rows.

    Repeated squaring would need fewer steps, but when the keys of a chunk are nearly equal the powers of m
    are large and cancel, which costs all digits in float32.
    """
    inverse = torch.eye(CHUNK, dtype=m.dtype, device=m.device).expand_as(m).clone()
    for i in range(1, CHUNK):
        inverse[..., i, :i] = (m[..., i : i + 1, :i] @ inverse[..., :i, :i]).squeeze(-2)
    return inverse


def _segments(reset: Tensor | None, chunks: int, heads: int, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
    """Masks of the first and last segment [B, H, chunks, 16, 1] and of equal segments [B, H, chunks, 16, 16]."""
    if reset is None:
        return None, None, None
    batch, tokens = reset.shape
    padded = F.pad(reset, (0, chunks * CHUNK - tokens))
    segment = padded.view(batch, 1, chunks, CHUNK).cumsum(-1).expand(batch, heads, chunks, CHUNK)
    first = (segment == 0)[..., None].to(dtype)
    last = (segment == segment[..., -1:])[..., None].to(dtype)
    same = segment[..., :, None] == segment[..., None, :]
    return first, last, same


def _intra(
    r: Tensor, w_raw: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, reset: Tensor | None, dtype: torch.dtype
) -> _Intra:
    tokens, heads = r.shape[1], r.shape[2]
    log_w = _to_chunks(-DECAY_SCALE * torch.sigmoid(w_raw.to(dtype)), dtype)
    r, k, v, a, b = (_to_chunks(x, dtype) for x in (r, k, v, a, b))
    incl = log_w.cumsum(-2)
    exp_incl, exp_excl, exp_neg = incl.exp(), (incl - log_w).exp(), (-incl).exp()
    decay_all = exp_incl[..., -1:, :]
    first, last, same = _segments(reset, r.shape[2], heads, dtype)
    r_tilde, a_tilde, b_hat, k_hat = r * exp_incl, a * exp_excl, b * exp_neg, k * exp_neg
    b_bar, k_bar = b_hat * decay_all, k_hat * decay_all
    below = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=r.device).tril(-1)
    upto = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=r.device).tril()
    if same is not None:
        below, upto = below & same, upto & same
    hats = torch.cat((b_hat, k_hat), -2).mT
    with_a, with_r = a_tilde @ hats, r_tilde @ hats
    m_ab, m_ak = (x.masked_fill(~below, 0) for x in with_a.split(CHUNK, -1))
    m_rb, m_rk = (x.masked_fill(~upto, 0) for x in with_r.split(CHUNK, -1))
    inverse = _unit_lower_inverse(m_ab)
    if first is not None and last is not None:
        a_tilde, r_tilde = a_tilde * first, r_tilde * first
        b_bar, k_bar = b_bar * last, k_bar * last
        decay_all = decay_all * first[..., -1:, :]
    assert tokens <= r.shape[2] * CHUNK
    return _Intra(
        r, k, v, a, b, exp_incl, exp_excl, exp_neg, decay_all, r_tilde, a_tilde, b_hat, k_hat, b_bar, k_bar,
        m_ab, m_ak, m_rb, m_rk, inverse, inverse @ a_tilde, first, last, same,
    )  # fmt: skip


def forward(
    r: Tensor, w_raw: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor, reset: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, outgoing state, and the state at the start of every 16 tokens.

    Args:
        r: [B, T, H, N], T >= 1, one floating dtype for all six.
        w_raw: same shape.
        k: same shape.
        v: same shape.
        a: same shape.
        b: same shape.
        state: [B, H, N_value, N_key], float32 (float64 if the inputs are); all arithmetic is in its dtype.
        reset: bool [B, T] or None.

    Returns:
        y [B, T, H, N] in the inputs' dtype; state after the last token; states [B, H, chunks, N, N].
    """
    dtype = state.dtype
    q = _intra(r, w_raw, k, v, a, b, reset, dtype)
    u_free = q.inverse @ (q.m_ak @ q.v)
    fresh = q.v.mT @ q.k_bar
    starts = torch.empty(*fresh.shape, dtype=dtype, device=state.device)
    u_all = torch.empty_like(q.v)
    for n in range(starts.shape[2]):
        starts[:, :, n] = state
        u = q.w[:, :, n] @ state.mT + u_free[:, :, n]
        u_all[:, :, n] = u
        state = state * q.decay_all[:, :, n] + u.mT @ q.b_bar[:, :, n] + fresh[:, :, n]
    y = q.r_tilde @ starts.mT + q.m_rb @ u_all + q.m_rk @ q.v
    return _from_chunks(y, r.shape[1], r.dtype), state, starts


def _reverse_scan(q: _Intra, dy: Tensor, du_free: Tensor, dstate: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the states at chunk ends [B, H, chunks, N, N], and of the incoming state."""
    fresh = dy.mT @ q.r_tilde
    at_end = torch.empty_like(fresh)
    for n in reversed(range(fresh.shape[2])):
        at_end[:, :, n] = dstate
        du = du_free[:, :, n] + q.b_bar[:, :, n] @ dstate.mT
        dstate = dstate * q.decay_all[:, :, n] + fresh[:, :, n] + du.mT @ q.w[:, :, n]
    return at_end, dstate


def _decay_gradient(q: _Intra, start_term: Tensor, x: Tensor, z: Tensor) -> Tensor:
    """Gradient of log w from the pair sums x = r dr - b db - k dk and z = a da (module docstring)."""
    if q.same is None or q.first is None:
        return start_term - z.cumsum(-2) - (x.cumsum(-2) - x)
    within = q.same.to(x.dtype)
    return q.first * start_term - within.tril() @ z - within.tril(-1) @ x


def backward(
    r: Tensor, w_raw: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
    reset: Tensor | None, starts: Tensor, dy: Tensor | None, dstate: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of r, w_raw, k, v, a, b (inputs' dtype) and of the incoming state.

    Args:
        r: as given to `forward`, like the next six.
        w_raw: see `forward`.
        k: see `forward`.
        v: see `forward`.
        a: see `forward`.
        b: see `forward`.
        reset: see `forward`.
        starts: third result of `forward`.
        dy: gradient of y, or None for zero.
        dstate: gradient of the outgoing state, or None for zero.
    """
    dtype, tokens = starts.dtype, r.shape[1]
    q = _intra(r, w_raw, k, v, a, b, reset, dtype)
    dy = torch.zeros_like(q.v) if dy is None else _to_chunks(dy, dtype)
    dstate = torch.zeros_like(starts[:, :, 0]) if dstate is None else dstate.to(dtype)
    u = q.w @ starts.mT + q.inverse @ (q.m_ak @ q.v)
    du_free = q.m_rb.mT @ dy
    at_end, dstate_in = _reverse_scan(q, dy, du_free, dstate)
    du = du_free + q.b_bar @ at_end.mT
    dz = q.inverse.mT @ du
    dv = q.m_rk.mT @ dy + q.k_bar @ at_end.mT + q.m_ak.mT @ dz
    below = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=r.device).tril(-1)
    upto = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=r.device).tril()
    if q.same is not None:
        below, upto = below & q.same, upto & q.same
    uv = torch.cat((u, q.v), -2).mT
    dm_ab, dm_ak = (x.masked_fill(~below, 0) for x in (dz @ uv).split(CHUNK, -1))
    dm_rb, dm_rk = (x.masked_fill(~upto, 0) for x in (dy @ uv).split(CHUNK, -1))
    from_state_r, from_state_a = dy @ starts, dz @ starts
    to_end = q.exp_neg * q.exp_incl[..., -1:, :]
    if q.first is not None and q.last is not None:
        from_state_r, from_state_a, to_end = from_state_r * q.first, from_state_a * q.first, to_end * q.last
    dr = q.exp_incl * (from_state_r + dm_rb @ q.b_hat + dm_rk @ q.k_hat)
    da = q.exp_excl * (from_state_a + dm_ab @ q.b_hat + dm_ak @ q.k_hat)
    a_inner, r_inner = q.a * q.exp_excl, q.r * q.exp_incl
    db = q.exp_neg * (dm_ab.mT @ a_inner + dm_rb.mT @ r_inner) + to_end * (u @ at_end)
    dk = q.exp_neg * (dm_ak.mT @ a_inner + dm_rk.mT @ r_inner) + to_end * (q.v @ at_end)
    dstarts = torch.cat((dstate_in[:, :, None], at_end[:, :, :-1]), 2)
    start_term = (starts * dstarts).sum(-2, keepdim=True)
    dlog_w = _decay_gradient(q, start_term, q.r * dr - q.b * db - q.k * dk, q.a * da)
    dlog_w = _from_chunks(dlog_w, tokens, dtype)
    raw = w_raw.to(dtype)
    dw_raw = (-DECAY_SCALE * dlog_w * torch.sigmoid(raw) * torch.sigmoid(-raw)).to(w_raw.dtype)
    dr, dk, dv, da, db = (_from_chunks(x, tokens, r.dtype) for x in (dr, dk, dv, da, db))
    return dr, dw_raw, dk, dv, da, db, dstate_in
