"""Time mixing of RWKV-7 (x070): token shift, low-rank gates, the WKV-7 recurrence, group norm, output."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.config.adapters import LoraSettings
from trainer.model.lora import linear
from trainer.model.naming import ModelShape
from trainer.ops.wkv7 import wkv7

__all__ = ["TimeMix", "token_shift"]

GROUP_NORM_EPS = 64e-5
"""Constant in the official model, whatever the head size."""


def token_shift(x_BTC: Tensor, shift_BC: Tensor, reset_BT: Tensor | None) -> tuple[Tensor, Tensor]:
    """Difference to the previous token, x_{t-1} - x_t, and the last token, which the next chunk shifts in.

    Args:
        x_BTC: normalised input of the sub-layer.
        shift_BC: the last token of the previous chunk.
        reset_BT: bool; where true the previous token counts as zero. None = nowhere.
    """
    if x_BTC.shape[1] == 0:
        return x_BTC, shift_BC.clone()
    previous_BTC = torch.cat((shift_BC.to(x_BTC.dtype)[:, None], x_BTC[:, :-1]), 1)
    if reset_BT is not None:
        previous_BTC = previous_BTC.masked_fill(reset_BT[..., None], 0)
    # A view would keep all T tokens alive for as long as the state is kept.
    return previous_BTC - x_BTC, x_BTC[:, -1].clone()


class TimeMix(nn.Module):
    """One block's time mixing, with the official parameter names and shapes.

    Args:
        shape: sizes and ranks of the model.
        layer: index of the block; block 0 makes the value that later blocks mix in.
        kernel: backend of `wkv7`.
        lora: adapters on the matrices; None = none.
    """

    x_r: nn.Parameter
    x_w: nn.Parameter
    x_k: nn.Parameter
    x_v: nn.Parameter
    x_a: nn.Parameter
    x_g: nn.Parameter
    w0: nn.Parameter
    w1: nn.Parameter
    w2: nn.Parameter
    a0: nn.Parameter
    a1: nn.Parameter
    a2: nn.Parameter
    v0: nn.Parameter
    v1: nn.Parameter
    v2: nn.Parameter
    g1: nn.Parameter
    g2: nn.Parameter

    def __init__(self, shape: ModelShape, layer: int, kernel: str, lora: LoraSettings | None = None) -> None:
        super().__init__()
        width, heads, size = shape.n_embd, shape.num_heads, shape.head_size
        self.layer, self.kernel, self.heads, self.size = layer, kernel, heads, size
        for name in "rwkvag":
            setattr(self, f"x_{name}", nn.Parameter(torch.empty(1, 1, width)))
        for name, rank in (("w", shape.rank_w), ("a", shape.rank_a), ("v", shape.rank_v), ("g", shape.rank_g)):
            setattr(self, f"{name}1", nn.Parameter(torch.empty(width, rank)))
            setattr(self, f"{name}2", nn.Parameter(torch.empty(rank, width)))
            if name != "g":
                setattr(self, f"{name}0", nn.Parameter(torch.empty(1, 1, width)))
        self.k_k = nn.Parameter(torch.empty(1, 1, width))
        self.k_a = nn.Parameter(torch.empty(1, 1, width))
        self.r_k = nn.Parameter(torch.empty(heads, size))
        self.receptance = linear(width, width, "att.receptance", lora)
        self.key = linear(width, width, "att.key", lora)
        self.value = linear(width, width, "att.value", lora)
        self.output = linear(width, width, "att.output", lora)
        self.ln_x = nn.GroupNorm(heads, width, eps=GROUP_NORM_EPS)

    def forward(
        self, x_BTC: Tensor, v_first_BTC: Tensor | None, shift_BC: Tensor, wkv_BHNN: Tensor, reset_BT: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Output, the value of block 0, and the new shift and recurrent states.

        Args:
            x_BTC: residual stream after ln1.
            v_first_BTC: value of block 0 for the same tokens; None in block 0.
            shift_BC: last token of the previous chunk after ln1.
            wkv_BHNN: recurrent state [B, H, N_value, N_key].
            reset_BT: bool, true where a document starts; None = nowhere.
        """
        batch, tokens, width = x_BTC.shape
        dx, shift_out = token_shift(x_BTC, shift_BC, reset_BT)
        mixes = (self.x_r, self.x_w, self.x_k, self.x_v, self.x_a, self.x_g)
        xr, xw, xk, xv, xa, xg = (x_BTC + dx * mix for mix in mixes)
        r, k, v = self.receptance(xr), self.key(xk), self.value(xv)
        w_raw = self.w0 + torch.tanh(xw @ self.w1) @ self.w2
        rate = torch.sigmoid(self.a0 + (xa @ self.a1) @ self.a2)
        gate = torch.sigmoid(xg @ self.g1) @ self.g2
        if v_first_BTC is None:
            v_first_BTC = v
        else:
            v = v + (v_first_BTC - v) * torch.sigmoid(self.v0 + (xv @ self.v1) @ self.v2)
        by_head = (batch, tokens, self.heads, self.size)
        kk = F.normalize((k * self.k_k).view(by_head).to(wkv_BHNN.dtype), dim=-1, eps=1e-12).to(x_BTC.dtype)
        k = k * (1 + (rate - 1) * self.k_a)
        r, w_raw, k, v_head, rate = (x.view(by_head) for x in (r, w_raw, k, v, rate))
        y, wkv_out = wkv7(r, w_raw, k, v_head, -kk, kk * rate, wkv_BHNN, reset_BT, self.kernel)
        y = self.ln_x(y.reshape(batch * tokens, width)).view(batch, tokens, width)
        bonus = (r * k * self.r_k).sum(-1, keepdim=True) * v_head
        y = y + bonus.view(batch, tokens, width)
        return self.output(y * gate), v_first_BTC, shift_out, wkv_out
