"""RWKV-7 "Goose" (x070) as a plain `nn.Module` with the official parameter names.

    hidden, state = model(ids, state, reset)
    logits = model.head(hidden)

Importing this needs PyTorch alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.config.adapters import LoraSettings, StateTuning
from trainer.model.block import Block
from trainer.model.naming import ModelShape
from trainer.model.state import LayerState, ModelState, zero_state

__all__ = ["RWKV7"]


def _block(
    block: nn.Module, x_BTC: Tensor, v_first_BTC: Tensor | None, state: LayerState, reset_BT: Tensor | None
) -> tuple[Tensor, Tensor, LayerState]:
    return block(x_BTC, v_first_BTC, state, reset_BT)


@functools.cache
def _compiled_block() -> Callable[..., tuple[Tensor, Tensor, LayerState]]:
    """`_block` compiled: one piece of code for all blocks of all models, specialised by sizes."""
    import torch._inductor.config as inductor

    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    # Rounding each operation as eager code does keeps the official loss curve; fused float32 would leave its band in the
    # first 20 steps.
    # PyTorch 2.10 to 2.12 loses the shape of [1, 1, C] gradients in this fusion (pytorch issue 178080).
    has_fusion = hasattr(inductor.triton, "mix_order_reduction")
    options: dict[str, Any] = {"emulate_precision_casts": True}
    if has_fusion:
        options["triton.mix_order_reduction"] = False
    return torch.compile(_block, fullgraph=True, dynamic=False, options=options)


class RWKV7(nn.Module):
    """The network. Parameters are uninitialised: load weights by official name (`load_state_dict`).

    Args:
        shape: sizes and ranks.
        kernel: backend of the recurrence, see `trainer.ops.wkv7.BACKENDS`.
        checkpoint_blocks: recompute each block in the backward pass instead of keeping its activations.
        compiled_tokens: inputs of exactly this many tokens run blocks compiled by torch.compile, others run
            them as they are, so that ragged last chunks do not compile anew. 0 = never.
        lora: adapters on the blocks' matrices; None = none.
        tuning: whether the state before a document is trained, and which parts of it; None = it is zero.
    """

    def __init__(
        self,
        shape: ModelShape,
        kernel: str = "auto",
        checkpoint_blocks: bool = False,
        compiled_tokens: int = 0,
        *,
        lora: LoraSettings | None = None,
        tuning: StateTuning | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.checkpoint_blocks, self.compiled_tokens = shape, checkpoint_blocks, compiled_tokens
        self.emb = nn.Embedding(shape.vocab_size, shape.n_embd)
        self.blocks = nn.ModuleList(Block(shape, layer, kernel, lora) for layer in range(shape.n_layer))
        self.ln_out = nn.LayerNorm(shape.n_embd)
        self.head = nn.Linear(shape.n_embd, shape.vocab_size, bias=False)
        self.has_dropout = lora is not None and lora.dropout > 0
        # Of the root, so that ZeRO-3 has gathered them when the first block runs.
        self.time_state: nn.Parameter | None = None
        self.shift_state: nn.Parameter | None = None
        if tuning is not None:
            size = shape.head_size
            self.time_state = nn.Parameter(torch.empty(shape.n_layer, shape.num_heads, size, size))
            if tuning.shifts:
                self.shift_state = nn.Parameter(torch.empty(shape.n_layer, 2, shape.n_embd))

    def zero_state(self, batch: int) -> ModelState:
        """State before the first token, on the device and in the dtype of the weights."""
        weight = self.ln_out.weight
        return zero_state(
            batch, self.shape.n_layer, self.shape.n_embd, self.shape.head_size, weight.device, weight.dtype
        )

    def _started(self, state: ModelState) -> ModelState:
        """The state before a document, zero so far, plus the trained one."""
        if self.time_state is None:
            return state
        started = []
        for layer, (shift_att, shift_ffn, wkv) in enumerate(state):
            if self.shift_state is not None:
                shift_att, shift_ffn = (x + self.shift_state[layer, i] for i, x in enumerate((shift_att, shift_ffn)))
            started.append(LayerState(shift_att, shift_ffn, wkv + self.time_state[layer].to(wkv.dtype)))
        return tuple(started)

    def forward(
        self,
        ids_BT: Tensor,
        state: ModelState | None = None,
        reset_BT: Tensor | None = None,
        is_start: bool = False,
    ) -> tuple[Tensor, ModelState]:
        """Run T >= 0 tokens.

        Args:
            ids_BT: int64 [B, T].
            state: state after the previous tokens; None = none came before.
            reset_BT: bool [B, T], true where a document starts and all state is dropped; None = nowhere. A reset
                drops a trained state too.
            is_start: all rows start a document here with a zero state, to which a trained one is added. So does
                a state that is left out.

        Returns:
            Residual stream after `ln_out` [B, T, C] (multiply by `head` for logits), and the state after
            the last token.
        """
        if state is None:
            state, is_start = self.zero_state(ids_BT.shape[0]), True
        if is_start:
            state = self._started(state)
        x_BTC, v_first_BTC = self.emb(ids_BT), None
        states: list[LayerState] = []
        run = _compiled_block() if 0 < ids_BT.shape[1] == self.compiled_tokens else _block
        for block, layer_state in zip(self.blocks, state, strict=True):
            if self.checkpoint_blocks and torch.is_grad_enabled():
                x_BTC, v_first_BTC, new = checkpoint(
                    run, block, x_BTC, v_first_BTC, layer_state, reset_BT,
                    use_reentrant=False, preserve_rng_state=self.has_dropout,
                )  # fmt: skip
            else:
                x_BTC, v_first_BTC, new = run(block, x_BTC, v_first_BTC, layer_state, reset_BT)
            states.append(new)
        return self.ln_out(x_BTC), tuple(states)
