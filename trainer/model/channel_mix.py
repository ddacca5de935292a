"""Channel mixing of RWKV-7 (x070): token shift and a squared-ReLU feed-forward layer without a gate."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainer.config.adapters import LoraSettings
from trainer.model.lora import linear
from trainer.model.naming import ModelShape
from trainer.model.time_mix import token_shift

__all__ = ["ChannelMix"]


class ChannelMix(nn.Module):
    """One block's channel mixing, with the official parameter names and shapes."""

    def __init__(self, shape: ModelShape, lora: LoraSettings | None = None) -> None:
        super().__init__()
        self.x_k = nn.Parameter(torch.empty(1, 1, shape.n_embd))
        self.key = linear(shape.n_embd, shape.dim_ffn, "ffn.key", lora)
        self.value = linear(shape.dim_ffn, shape.n_embd, "ffn.value", lora)

    def forward(self, x_BTC: Tensor, shift_BC: Tensor, reset_BT: Tensor | None) -> tuple[Tensor, Tensor]:
        """Output and the new shift state; arguments as in `TimeMix.forward`, after ln2."""
        dx, shift_out = token_shift(x_BTC, shift_BC, reset_BT)
        return self.value(torch.relu(self.key(x_BTC + dx * self.x_k)).square()), shift_out
