"""The recurrent state as a value: passed into the model and returned, never kept by a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["LayerState", "ModelState", "detach_state", "map_state", "state_tensors", "zero_state"]


class LayerState(NamedTuple):
    """What one block hands from one token to the next."""

    shift_att: Tensor
    """[B, C], input of time mixing (after ln1) at the last token, in the activations' dtype."""
    shift_ffn: Tensor
    """[B, C], input of channel mixing (after ln2) at the last token."""
    wkv: Tensor
    """[B, H, N_value, N_key], float32 (float64 for float64 weights)."""


ModelState = tuple[LayerState, ...]


def zero_state(
    batch: int, num_layers: int, width: int, head_size: int, device: torch.device | str, dtype: torch.dtype
) -> ModelState:
    """State before the first token of a document, for activations of `dtype`."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    heads = width // head_size
    # Two tensors for all layers: one launch each on a GPU.
    shift_L2BC = torch.zeros(num_layers, 2, batch, width, device=device, dtype=dtype)
    wkv_LBHNN = torch.zeros(num_layers, batch, heads, head_size, head_size, device=device, dtype=wide)
    return tuple(LayerState(shift[0], shift[1], wkv) for shift, wkv in zip(shift_L2BC, wkv_LBHNN, strict=True))


def map_state(function: Callable[[Tensor], Tensor], state: ModelState) -> ModelState:
    """Apply `function` to every tensor of the state."""
    return tuple(LayerState(*(function(x) for x in layer)) for layer in state)


def detach_state(state: ModelState) -> ModelState:
    """The same numbers without their graph."""
    return map_state(Tensor.detach, state)


def state_tensors(state: ModelState) -> list[Tensor]:
    """All tensors of the state, layer by layer."""
    return [tensor for layer in state for tensor in layer]
