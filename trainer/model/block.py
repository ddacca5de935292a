"""One residual block: time mixing, then channel mixing."""

from __future__ import annotations

from torch import Tensor, nn

from trainer.config.adapters import LoraSettings
from trainer.model.channel_mix import ChannelMix
from trainer.model.naming import ModelShape
from trainer.model.state import LayerState
from trainer.model.time_mix import TimeMix

__all__ = ["Block"]


class Block(nn.Module):
    """Block `layer` of the network; block 0 also holds the norm after the embedding (`ln0`)."""

    def __init__(self, shape: ModelShape, layer: int, kernel: str, lora: LoraSettings | None = None) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(shape.n_embd)
        self.ln2 = nn.LayerNorm(shape.n_embd)
        if layer == 0:
            self.ln0 = nn.LayerNorm(shape.n_embd)
        self.att = TimeMix(shape, layer, kernel, lora)
        self.ffn = ChannelMix(shape, lora)

    def forward(
        self, x_BTC: Tensor, v_first_BTC: Tensor | None, state: LayerState, reset_BT: Tensor | None
    ) -> tuple[Tensor, Tensor, LayerState]:
        """Residual stream after the block, the value of block 0, and the block's state after the last token."""
        if v_first_BTC is None:
            x_BTC = self.ln0(x_BTC)
        mixed, v_first_BTC, shift_att, wkv = self.att(
            self.ln1(x_BTC), v_first_BTC, state.shift_att, state.wkv, reset_BT
        )
        x_BTC = x_BTC + mixed
        mixed, shift_ffn = self.ffn(self.ln2(x_BTC), state.shift_ffn, reset_BT)
        return x_BTC + mixed, v_first_BTC, LayerState(shift_att, shift_ffn, wkv)
